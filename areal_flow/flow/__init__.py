"""Decides what is submitted and trained, and when. Pure asyncio; imports no vendor."""
