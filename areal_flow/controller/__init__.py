"""What may be submitted, what is consumed, what happens next. Pure asyncio; knows no vendor."""
