"""What runs in a zygote and in the processes forked from it: the standard library and nothing else.

A zygote imports this folder as a package of its own, so nothing of it may import `areal_flow`.
"""
