//! How byte-level vocabularies cut text into words before merging, by the names that GGUF files use.
//!
//! A `tokenizer.json` carries its own regular expressions. GGUF files only name them (`tokenizer.ggml.pre`), so that the
//! expressions, as each model's `tokenizer.json` has them, must be known here.

/// A named way to cut text into words.
pub(super) struct WordRule {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied one after the other; each isolates its matches.
    pub(super) patterns: &'static [&'static str],
    /// A word that is a token as a whole is not put together by merges (as in tiktoken).
    pub(super) whole_words: bool,
    /// Beginning of text before a prompt, where the file doesn't say.
    pub(super) adds_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const KIMI: &str = r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CASED_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}",
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+"
);
const CJK_AND_HANGUL: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";

const PLAIN: WordRule = WordRule { names: &[], patterns: &[], whole_words: false, adds_bos: false };

#[rustfmt::skip]
const RULES: &[WordRule] = &[
    WordRule {
        names: &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        patterns: &[LLAMA3], whole_words: true, adds_bos: true,
    },
    WordRule { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, adds_bos: true },
    WordRule { names: &["glm4", "glm5"], patterns: &[LLAMA3], whole_words: true, ..PLAIN },
    WordRule { names: &["minicpm5"], patterns: &[r"\p{N}{1,3}", MINICPM5], whole_words: true, ..PLAIN },
    WordRule { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], patterns: &[LLAMA3], ..PLAIN },
    WordRule {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez", "kormo", "grok-2"],
        patterns: &[QWEN2], ..PLAIN
    },
    WordRule { names: &["qwen35"], patterns: &[QWEN35], ..PLAIN },
    WordRule { names: &["laguna"], patterns: &[r"[^\n]+|\n+", QWEN2], ..PLAIN },
    WordRule { names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"], patterns: &[GPT4O], ..PLAIN },
    WordRule { names: &["tiny_aya", "cohere2moe"], patterns: &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O], ..PLAIN },
    WordRule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        patterns: &[r"\p{N}{1,3}", CJK, DEEPSEEK3], ..PLAIN
    },
    WordRule {
        names: &["deepseek-llm"],
        patterns: &[r"[\r\n]", CASED_LETTERS, r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+", r"\s+$", CJK_AND_HANGUL, r"\p{N}+"], ..PLAIN
    },
    WordRule {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"], ..PLAIN
    },
    WordRule { names: &["kimi-k2"], patterns: &[KIMI], whole_words: true, ..PLAIN },
    WordRule { names: &["bailingmoe", "bailingmoe2", "llada-moe"], patterns: &[BAILING], ..PLAIN },
    WordRule { names: &["seed-coder"], patterns: &[SEED_CODER], ..PLAIN },
    WordRule { names: &["exaone-moe"], patterns: &[EXAONE_MOE], ..PLAIN },
    WordRule {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        patterns: &[r"\p{N}", GPT2], ..PLAIN
    },
    WordRule {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"],
        patterns: &[GPT2], ..PLAIN
    },
    WordRule { names: &["falcon"], patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], ..PLAIN },
    WordRule { names: &["viking"], patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"], ..PLAIN },
    WordRule { names: &["poro-chat", "bloom", "gpt3-finnish"], patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+"], ..PLAIN },
    // Files from before the key existed.
    WordRule { names: &["", "default"], patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], ..PLAIN },
];

/// The rule with a name.
pub(super) fn word_rule(name: &str) -> Option<&'static WordRule> {
    RULES.iter().find(|rule| rule.names.contains(&name))
}
