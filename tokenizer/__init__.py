"""Training and loading tokenizers: SentencePiece BPE and GPT-2's byte-level BPE behind one interface."""
