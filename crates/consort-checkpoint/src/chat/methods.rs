//! Python's methods of texts, lists and mappings, and formatting, paid for before they work.
//!
//! `minijinja` takes fuel for what a method returns when it is there. Some make far more than they were given, or look at far
//! more than they make, and a hostile template would have its way before the fuel is gone.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Rest, ValueKind};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Bytes that one unit of fuel pays for.
const BYTES_PER_FUEL: usize = 64;

/// Calls `method` of `value`.
///
/// # Errors
/// No fuel is left, no such method, or arguments that it can't take.
pub(super) fn call(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let pay = |bytes: usize| pay(state, bytes);
    let length_bytes = value.as_str().map_or(0, str::len);
    pay(length_bytes)?;
    // Where a text is wanted, a list's is made.
    for argument in arguments {
        pay_for_printing(state, argument)?;
    }
    let first = arguments.first();
    match (method, value.kind(), first) {
        // Every item is written out, however often it is repeated.
        ("join", ValueKind::String, Some(items)) => {
            for item in items.try_iter()? {
                pay_for_text(&item, &pay, 0)?;
            }
        }
        // Every character is compared with every given one.
        ("strip" | "lstrip" | "rstrip", _, Some(characters)) => {
            pay(length_bytes.saturating_mul(characters.as_str().map_or(0, str::len)))?;
        }
        // Every item is compared with the text.
        ("startswith" | "endswith", _, Some(items)) if items.as_str().is_none() => {
            for item in items.try_iter()? {
                pay(item.as_str().map_or(0, str::len).min(length_bytes).max(1))?;
            }
        }
        // Every item is compared with what is looked for.
        ("count", ValueKind::Seq, Some(wanted)) => {
            for _ in value.try_iter()? {
                pay_for_text(wanted, &pay, 0)?;
            }
        }
        ("format", ValueKind::String, _) => {
            pay_for_format(value.as_str().unwrap_or_default(), '{', arguments, &pay)?;
        }
        _ => {}
    }
    unknown_method_callback(state, value, method, arguments)
}

/// The filter `format`: `'%s'|format(x)`.
///
/// # Errors
/// As [`call`].
pub(super) fn format(state: &State, format: &str, arguments: Rest<Value>) -> Result<String, Error> {
    pay_for_format(format, '%', &arguments, &|bytes| pay(state, bytes))?;
    formatting::format(FormatStyle::Printf, format, &arguments)
}

/// The text of a value, as printing it or the filter `string` gives it.
///
/// # Errors
/// As [`call`].
pub(super) fn text(state: &State, value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value.clone());
    }
    pay_for_printing(state, value)?;
    Ok(Value::from(value.to_string()))
}

/// Pays for the text of a list or a mapping, which can be far longer than what it was made of: its parts may be shared.
///
/// # Errors
/// No fuel is left.
pub(super) fn pay_for_printing(state: &State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => pay_for_text(value, &|bytes| pay(state, bytes), 0),
        _ => Ok(()),
    }
}

/// Pays for so many bytes of text.
///
/// # Errors
/// No fuel is left.
pub(super) fn pay(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes.div_ceil(BYTES_PER_FUEL) as u64)
}

/// Pays for a text whose every field may hold all arguments and be as wide as it says.
fn pay_for_format(
    format: &str,
    field: char,
    arguments: &[Value],
    pay: &dyn Fn(usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let numbers = format.split(|character: char| !character.is_ascii_digit()).filter(|digits| !digits.is_empty());
    pay(numbers.fold(0, |all: usize, digits| all.saturating_add(digits.parse().unwrap_or(usize::MAX))))?;
    for _ in format.matches(field) {
        arguments.iter().try_for_each(|argument| pay_for_text(argument, pay, 0))?;
    }
    Ok(())
}

/// Deeper values than this have no text; nothing real does.
const MAX_DEPTH: usize = 128;

/// Pays for the text of a value as often as the value's parts occur in it.
pub(super) fn pay_for_text(value: &Value, pay: &dyn Fn(usize) -> Result<(), Error>, depth: usize) -> Result<(), Error> {
    const SCALAR_BYTES: usize = 32;
    match value.kind() {
        ValueKind::String => pay(value.as_str().map_or(0, str::len).max(1)),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable if depth < MAX_DEPTH => {
            for item in value.try_iter()? {
                pay(SCALAR_BYTES)?;
                if value.kind() == ValueKind::Map {
                    pay_for_text(&value.get_item(&item)?, pay, depth + 1)?;
                }
                pay_for_text(&item, pay, depth + 1)?;
            }
            Ok(())
        }
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => pay(usize::MAX),
        _ => pay(SCALAR_BYTES),
    }
}
