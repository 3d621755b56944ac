"""Prompts, synthetic stand-ins, tokenizer and packing."""
