//! The steps of a tokenizer, run one by one under limits.
//!
//! A `tokenizer.json` is a stranger's. Its normalizers can multiply a text until the memory is full, and some that make no sense make
//! the `tokenizers` crate panic. So each step is asked beforehand how much it will make, and a panic inside it becomes an error that
//! names the file and the step.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;
use serde_json::Value;
use tokenizers::utils::SysRegex;
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

use super::TokenizerError;

/// What a text may become on its way to the model: so many times its own bytes, and some more for short ones. NFKC makes 11 bytes of one
/// at most, and the marks that stand for spaces are three bytes long.
const GROWTH: usize = 32;
const GROWTH_BYTES: usize = 64 << 10;
/// Published tokenizers have fewer than ten steps of a kind.
const MAX_STEPS: usize = 64;
/// The longest text that a step puts in place of another, or before one. Published ones have a few characters.
const MAX_TEXT_BYTES: usize = 1024;
/// A text is measured in pieces of this size, each of which may grow by [`MAX_TEXT_BYTES`] for every byte.
const PIECE_BYTES: usize = 64;
/// The most that Unicode's normal forms, lower case and the like make of one byte.
const UNICODE_GROWTH: usize = 16;
/// Texts that every tokenizer is tried on when it is loaded.
const TRIALS: [&str; 5] = ["a", " ", "é", "▁Ġ😀", "Ab  c1 2\n\t\u{e9}\u{301}. <s>xx"];

/// The normalizers and pre-tokenizers of one tokenizer, in order.
#[derive(Default)]
pub(super) struct Steps {
    place: String,
    normalizers: Vec<NormalizerWrapper>,
    pre_tokenizers: Vec<PreTokenizerWrapper>,
}

/// The bytes that a text may still become.
pub(super) struct Budget {
    limit: usize,
    left: Cell<usize>,
}

impl Budget {
    /// For a text of so many bytes.
    pub(super) fn of(bytes: usize) -> Self {
        let limit = bytes.saturating_mul(GROWTH).saturating_add(GROWTH_BYTES);
        Self { limit, left: Cell::new(limit) }
    }
}

impl Steps {
    /// The steps of `pipeline`; `place` names the file in errors.
    ///
    /// # Errors
    /// More steps than any tokenizer has, texts longer than any has.
    pub(super) fn of(pipeline: &tokenizers::Tokenizer, place: &str) -> Result<Self, TokenizerError> {
        let mut steps = Self { place: place.to_owned(), ..Self::default() };
        flatten_normalizers(pipeline.get_normalizer(), &mut steps.normalizers);
        flatten_pre_tokenizers(pipeline.get_pre_tokenizer(), &mut steps.pre_tokenizers);
        for (kind, count) in [("normalizers", steps.normalizers.len()), ("pre-tokenizers", steps.pre_tokenizers.len())]
        {
            if count > MAX_STEPS {
                return Err(TokenizerError::invalid(place, format!("{count} {kind}, and {MAX_STEPS} at most are run")));
            }
        }
        for (index, step) in steps.normalizers.iter().enumerate() {
            let what = || Step::normalizer(index, step);
            if let Some(reason) = steps.guard(&what, || senseless(step))? {
                return Err(TokenizerError::invalid(place, format!("{}: {reason}", what())));
            }
        }
        Ok(steps)
    }

    /// Runs every step on some short texts, so that one that always fails is found when the tokenizer is loaded.
    ///
    /// # Errors
    /// The step that fails.
    pub(super) fn try_out(&self) -> Result<(), TokenizerError> {
        for text in TRIALS {
            let budget = Budget::of(text.len());
            let mut whole = NormalizedString::from(text);
            self.normalize(&mut whole, &budget)?;
            self.pre_tokenize(&mut PreTokenizedString::from(whole), &budget)?;
        }
        Ok(())
    }

    /// Runs the normalizers on one piece of a text. What it becomes is taken from the budget.
    ///
    /// # Errors
    /// A step that makes more of the text than the budget allows, or fails.
    pub(super) fn normalize(&self, text: &mut NormalizedString, budget: &Budget) -> Result<(), TokenizerError> {
        let left = budget.left.get();
        for (index, step) in self.normalizers.iter().enumerate() {
            let what = || Step::normalizer(index, step);
            if most_bytes(step, text.get().len()) > left {
                self.measure(step, text.get(), left, &what)?;
            }
            self.guard(&what, || step.normalize(text))?;
        }
        match left.checked_sub(text.get().len()) {
            Some(left) => budget.left.set(left),
            None => return Err(self.too_much("its normalizers", budget.limit)),
        }
        Ok(())
    }

    /// Runs the pre-tokenizers on all pieces that hold no token yet.
    ///
    /// # Errors
    /// As [`Steps::normalize`].
    pub(super) fn pre_tokenize(&self, pieces: &mut PreTokenizedString, budget: &Budget) -> Result<(), TokenizerError> {
        for (index, step) in self.pre_tokenizers.iter().enumerate() {
            let what = || Step { kind: "pre-tokenizer", number: index + 1, name: kind_of(step) };
            if matches!(step, PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Metaspace(_)) {
                let bytes = Cell::new(0usize);
                // Nothing is changed; there is no other way to look at the pieces without a list of them.
                let measure = |piece: &mut NormalizedString| {
                    bytes.set(bytes.get().saturating_add(most_bytes_of_piece(step, piece.get())));
                    Ok(())
                };
                self.guard(&what, || pieces.normalize(measure))?;
                if bytes.get() > budget.limit {
                    return Err(self.too_much(&what().to_string(), budget.limit));
                }
            }
            self.guard(&what, || step.pre_tokenize(pieces))?;
        }
        Ok(())
    }

    /// Runs a part of the `tokenizers` crate; a panic in it is the fault of the file.
    ///
    /// # Errors
    /// What the part says, and panics, both with the file and with `what`.
    pub(super) fn guard<T>(
        &self,
        what: &dyn Fn() -> Step,
        part: impl FnOnce() -> tokenizers::Result<T>,
    ) -> Result<T, TokenizerError> {
        guarded(part).map_err(|error| match error.downcast() {
            // From a step inside the part.
            Ok(ours) => *ours,
            Err(error) => TokenizerError::invalid(&self.place, format!("{}: {error}", what())),
        })
    }

    /// Adds up what a step makes of the pieces of `text`.
    fn measure(
        &self,
        step: &NormalizerWrapper,
        text: &str,
        left: usize,
        what: &dyn Fn() -> Step,
    ) -> Result<(), TokenizerError> {
        let (mut rest, mut bytes) = (text, 0);
        while !rest.is_empty() {
            let (piece, others) = rest.split_at(rest.ceil_char_boundary(PIECE_BYTES.min(rest.len())));
            let mut piece = NormalizedString::from(piece);
            self.guard(what, || step.normalize(&mut piece))?;
            bytes += piece.get().len();
            if bytes > left {
                return Err(self.too_much(&what().to_string(), left));
            }
            rest = others;
        }
        Ok(())
    }

    fn too_much(&self, what: &str, bytes: usize) -> TokenizerError {
        let reason = format!("{what}: makes more than {bytes} bytes of a text, which is far more than it was");
        TokenizerError::invalid(&self.place, reason)
    }
}

/// Names a part of a tokenizer: `normalizer 2 (Replace)`.
pub(super) struct Step {
    kind: &'static str,
    number: usize,
    name: String,
}

impl Step {
    /// A part of which there is one.
    pub(super) fn only(kind: &'static str) -> Self {
        Self { kind, number: 0, name: String::new() }
    }

    fn normalizer(index: usize, step: &NormalizerWrapper) -> Self {
        Self { kind: "normalizer", number: index + 1, name: kind_of(step) }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, number, name } = self;
        match number {
            0 => formatter.write_str(kind),
            _ => write!(formatter, "{kind} {number} ({name})"),
        }
    }
}

/// What files call a step.
fn kind_of(step: &impl Serialize) -> String {
    let json = serde_json::to_value(step).unwrap_or_default();
    json["type"].as_str().unwrap_or("unknown").to_owned()
}

fn flatten_normalizers(step: Option<&NormalizerWrapper>, steps: &mut Vec<NormalizerWrapper>) {
    match step {
        Some(NormalizerWrapper::Sequence(sequence)) => {
            sequence.as_ref().iter().for_each(|step| flatten_normalizers(Some(step), steps));
        }
        step => steps.extend(step.cloned()),
    }
}

fn flatten_pre_tokenizers(step: Option<&PreTokenizerWrapper>, steps: &mut Vec<PreTokenizerWrapper>) {
    match step {
        Some(PreTokenizerWrapper::Sequence(sequence)) => {
            sequence.as_ref().iter().for_each(|step| flatten_pre_tokenizers(Some(step), steps));
        }
        step => steps.extend(step.cloned()),
    }
}

/// Why a normalizer can do no good, if it can't.
fn senseless(step: &NormalizerWrapper) -> tokenizers::Result<Option<String>> {
    let json = serde_json::to_value(step)?;
    let text = match step {
        NormalizerWrapper::Replace(replace) => {
            let regex = match (json["pattern"]["String"].as_str(), json["pattern"]["Regex"].as_str()) {
                (Some(text), _) => regex_syntax::escape(text),
                (None, regex) => regex.unwrap_or_default().to_owned(),
            };
            if SysRegex::new(&regex)?.find_iter("").next().is_some() {
                return Ok(Some("its pattern is found in an empty text, and so everywhere".to_owned()));
            }
            &replace.content
        }
        NormalizerWrapper::Prepend(prepend) if prepend.prepend.is_empty() => {
            return Ok(Some("the text to put first is empty".to_owned()));
        }
        NormalizerWrapper::Prepend(prepend) => &prepend.prepend,
        _ => return Ok(None),
    };
    let bytes = text.len();
    Ok((bytes > MAX_TEXT_BYTES).then(|| format!("a text of {bytes} bytes; {MAX_TEXT_BYTES} at most are taken")))
}

/// The most bytes that a normalizer makes of so many.
fn most_bytes(step: &NormalizerWrapper, bytes: usize) -> usize {
    let factor = match step {
        NormalizerWrapper::Replace(replace) => 2 * (1 + replace.content.len()),
        NormalizerWrapper::Prepend(prepend) => return bytes.saturating_add(prepend.prepend.len()),
        NormalizerWrapper::Precompiled(_) => MAX_TEXT_BYTES,
        _ => UNICODE_GROWTH,
    };
    bytes.saturating_mul(factor)
}

/// The most bytes that a pre-tokenizer which changes text makes of one piece.
fn most_bytes_of_piece(step: &PreTokenizerWrapper, piece: &str) -> usize {
    /// A space before the piece, in whichever spelling.
    const PREFIX_BYTES: usize = 4;
    let bytes = piece.bytes();
    PREFIX_BYTES
        + match step {
            PreTokenizerWrapper::ByteLevel(_) => bytes.map(|byte| 1 + usize::from(!byte.is_ascii_graphic())).sum(),
            _ => bytes.map(|byte| if byte == b' ' { PREFIX_BYTES } else { 1 }).sum::<usize>(),
        }
}

/// Checks a table of characters and what to write for them, which the `tokenizers` crate only takes apart.
///
/// # Errors
/// What is wrong with it, for all tables in `normalizer`, a section of a `tokenizer.json`.
pub(super) fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    match normalizer {
        Value::Array(steps) => steps.iter().try_for_each(check_charsmaps),
        Value::Object(members) => members.iter().try_for_each(|(key, value)| match value.as_str() {
            Some(base64) if key == "precompiled_charsmap" => {
                let wrong = |reason: &str| format!("normalizer Precompiled: precompiled_charsmap {reason}");
                let bytes = STANDARD.decode(base64).map_err(|_| wrong("is no base64"))?;
                let (size, rest) = bytes.split_first_chunk().ok_or_else(|| wrong("is cut"))?;
                let size = u32::from_le_bytes(*size) as usize;
                let texts = rest.get(size..).filter(|_| size > 0 && size.is_multiple_of(4));
                let texts = texts.ok_or_else(|| wrong("is cut"))?;
                let texts = std::str::from_utf8(texts).map_err(|_| wrong("holds no UTF-8"))?;
                match texts.split('\0').find(|text| text.len() > MAX_TEXT_BYTES) {
                    Some(text) => Err(wrong(&format!("has a text of {} bytes", text.len()))),
                    None => Ok(()),
                }
            }
            _ => check_charsmaps(value),
        }),
        _ => Ok(()),
    }
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic on this thread is about to become an error that blames a file: whoever reports panics should leave it alone.
pub fn is_guarded() -> bool {
    GUARDED.get()
}

/// Runs a part of the `tokenizers` crate.
///
/// # Errors
/// What the part says, or that it panicked and with which words.
pub(super) fn guarded<T>(part: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    let before = GUARDED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(part));
    GUARDED.set(before);
    match done {
        Ok(done) => done,
        Err(panic) => {
            let words = panic.downcast_ref::<&str>().copied();
            let words = words.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given");
            let words = words.lines().next().unwrap_or_default();
            Err(format!("the tokenizers library fails on it ({words}); mend the file or download it again").into())
        }
    }
}
