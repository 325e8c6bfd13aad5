"""Questions in, a memory-mapped table of tokenised prompts out; read by submission index."""
