"""Text in, token ids out, and back: tokenizer, chat template, detokenizer, stop strings.

Knows nothing of models, engines or HTTP.
"""
