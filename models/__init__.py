"""Token ids and pages to logits; checkpoints; tokenizers, chat templates and the detokenizer.

Knows no requests.
"""
