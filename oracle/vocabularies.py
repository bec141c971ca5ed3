"""Small vocabularies of tiktoken's kind and the ids that tiktoken and mistral-common give for some texts.

Run by hand: `python oracle/vocabularies.py`, in a virtual environment with tiktoken 0.14.0 and mistral-common 1.13.1. Writes
crates/consort-checkpoint/tests/vocabularies: `tekken.json`, `ranks.tiktoken`, and `expected.json`, a list of
[text, ids by mistral-common, ids by tiktoken].
"""

import base64
import json
import random
from pathlib import Path

import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tiktoken._educational import bpe_train

OUT = Path(__file__).parents[1] / "crates/consort-checkpoint/tests/vocabularies"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCES = """The rank that holds the first layer reads the tokens and sends what it made of them to the next.
A banana in a bandana, an anagram, a bananarama: aaaa aaaaa aaaaaa ababab abababa.
Der schnelle Zug fährt über die Brücke; die Straße ist naß. L'été, à côté d'un chêne, où çà et là on rêve.
数字と漢字とかな。中文字符和标点，以及换行。 Ещё раз, без спешки: числа и слова. שלום עולם, مرحبا بالعالم.
def gather(rows, columns):\n    return [row[column] for row in rows for column in columns]\n\n\tif x != 0:\n\t\tx -= 1
12 123 1234 12345 3.14159 1e-5 0xFF 2026-03-09 😀 👩‍👩‍👧 e\u0301 \u200d  two  spaces   three    four
"""
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
TEXTS = [
    "", " ", "  ", "   x", "a", "aaaaaaaaaaaaaaaaaaaa", "bananabananabandana", "The rank", " the rank\n", "\n\n \n\tx",
    "don't DON'T we'LL", "12345 1234567", "x=1;y=2//z\n", "über naß", "数字と漢字", "中文\n字符", "Ещё раз", "שלום",
    "😀👩‍👩‍👧", "e\u0301\u200d", "\u00a0\u2003x", "</s> [INST] <s>", "camelCaseAndHTTPServer", "a" * 300 + "b" * 301,
]


def main() -> None:
    ranks = bpe_train(data=SENTENCES * 3, vocab_size=560, pat_str=LLAMA3, visualise=None)
    line = lambda token, rank: f"{base64.b64encode(token).decode()} {rank}\n"
    (OUT / "ranks.tiktoken").write_text("".join(line(token, rank) for token, rank in ranks.items()))

    # The file holds more tokens than the vocabulary takes, as published ones do.
    entry = lambda token, rank: {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
    tekken = {
        "config": {"pattern": TEKKEN, "num_vocab_tokens": 560, "default_vocab_size": 510, "default_num_special_tokens": 10,
                   "version": "v11"},
        "vocab": [entry(token, rank) for token, rank in ranks.items()],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
    }
    (OUT / "tekken.json").write_text(json.dumps(tekken, separators=(",", ":")))
    mistral = Tekkenizer.from_file(OUT / "tekken.json")
    plain = tiktoken.Encoding("ranks", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})

    generator = random.Random(5)
    pieces = [*"ab nÜé 1\n\t'", "an", "ban", " the", "  ", "漢字", "😀", "'s", "—"]
    texts = TEXTS + ["".join(generator.choices(pieces, k=generator.randrange(1, 40))) for _ in range(60)]
    expected = [[text, mistral.encode(text, bos=False, eos=False), plain.encode_ordinary(text)] for text in texts]
    (OUT / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")))


main()
