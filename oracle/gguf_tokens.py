"""The tokenizer of the GGUF fixtures: made-up tokens."""

import gguf


def write_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"t{index}" for index in range(3, vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
