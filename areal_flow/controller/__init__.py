"""Decides what is submitted and trained, and when. Pure asyncio; it refuses to know a vendor."""
