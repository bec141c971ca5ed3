//! Jinja as templates expect it: the environment in which `transformers` renders them.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};

use super::Clock;
use super::json::Style;
use super::{charge, methods};

/// Work that one rendering may cost, in minijinja's unit: one instruction, or 64 bytes of text that is made. A conversation of a
/// million tokens costs less than a million; an endless template is stopped within seconds, and before its texts fill 128 MB.
const FUEL: u64 = 2_000_000;
/// Writing JSON is slower than copying: this many bytes for a unit.
const JSON_BYTES_PER_FUEL: usize = 16;
/// The longest format of a date.
const MAX_DATE_FORMAT_BYTES: usize = 256;

/// An environment without templates.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax());
    environment.set_fuel(Some(FUEL));
    // Nothing is escaped, but see [`super::charge`].
    environment.set_auto_escape_callback(|_| AutoEscape::Custom("text".into()));
    environment.set_unknown_method_callback(methods::call);
    environment.add_filter("tojson", to_json);
    environment.add_filter("format", methods::format);
    environment.add_filter("string", methods::text);
    environment.add_filter("pprint", methods::text);
    environment.set_formatter(|out, state, value| {
        methods::pay_for_printing(state, value)?;
        write!(out, "{value}").map_err(Error::from)
    });
    for (name, filter) in TEXT_FILTERS {
        let filter = filter();
        environment.add_filter(*name, move |state: &mut State, arguments: Rest<Value>| {
            arguments.iter().try_for_each(|argument| methods::pay_for_printing(state, argument))?;
            if *name == "indent" {
                pay_for_indent(state, &arguments)?;
            }
            filter.call(state, &arguments)
        });
    }
    for name in ["startingwith", "endingwith"] {
        environment.add_test(name, move |state: &State, text: &Value, part: &Value| {
            [text, part].into_iter().try_for_each(|value| methods::pay_for_printing(state, value))?;
            let (text, part) = (text.to_string(), part.to_string());
            Ok::<bool, Error>(if name == "startingwith" { text.starts_with(&part) } else { text.ends_with(&part) })
        });
    }
    environment.add_test("in", |state: &State, value: &Value, container: &Value| {
        methods::pay_for_printing(state, value)?;
        minijinja::tests::is_in(state, value, container)
    });
    environment.add_filter(charge::PAID, |state: &State, value: Value| {
        methods::pay_for_printing(state, &value)?;
        Ok::<Value, Error>(value)
    });
    // Prints its arguments and all variables, at no cost.
    environment.remove_global("debug");
    environment.add_test("iterable", |value: &Value| is_sequence(value) || value.kind() == ValueKind::Iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", |state: &State, reason: &Value| {
        methods::pay_for_printing(state, reason)?;
        Err::<Value, _>(invalid(reason))
    });
    set_clock(&mut environment, Arc::new(jiff::ZonedDateTime::now));
    environment
}

/// How templates are written.
pub(super) fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the usual delimiters don't clash")
}

/// A filter as a value that can be called.
type MakeFilter = fn() -> Value;

/// Filters that turn their arguments into text, which is paid for as if it were printed.
const TEXT_FILTERS: &[(&str, MakeFilter)] = &[
    ("safe", || Value::from_function(filters::safe)),
    ("escape", || Value::from_function(escape)),
    ("e", || Value::from_function(escape)),
    ("lower", || Value::from_function(filters::lower)),
    ("upper", || Value::from_function(filters::upper)),
    ("title", || Value::from_function(filters::title)),
    ("capitalize", || Value::from_function(filters::capitalize)),
    ("replace", || Value::from_function(filters::replace)),
    ("trim", || Value::from_function(filters::trim)),
    ("join", || Value::from_function(filters::join)),
    ("split", || Value::from_function(filters::split)),
    ("lines", || Value::from_function(filters::lines)),
    ("indent", || Value::from_function(filters::indent)),
];

/// Pays for the spaces of `indent(width)`, which is also `indent(width=...)`.
fn pay_for_indent(state: &State, arguments: &[Value]) -> Result<(), Error> {
    let lines = 1 + arguments.first().and_then(Value::as_str).map_or(0, |text| text.matches('\n').count());
    let named = arguments.last().and_then(|last| last.get_attr("width").ok());
    let widths = arguments.get(1).cloned().into_iter().chain(named).filter_map(|width| width.as_usize());
    methods::pay(state, widths.max().unwrap_or(0).saturating_mul(lines))
}

/// Escapes for HTML, as Python's `escape` does; marks are passed over, because texts bear them here that bear none in Python.
fn escape(value: &Value) -> Value {
    let mut escaped = String::new();
    for character in value.to_string().chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    Value::from_safe_string(escaped)
}

/// Makes `strftime_now` tell the time of `clock`.
pub(super) fn set_clock(environment: &mut Environment<'static>, clock: Arc<Clock>) {
    let now = move |format: &str| {
        if format.len() > MAX_DATE_FORMAT_BYTES {
            return Err(invalid(format!("strftime_now takes a format of {MAX_DATE_FORMAT_BYTES} bytes at most")));
        }
        jiff::fmt::strtime::format(format, &clock()).map_err(invalid)
    };
    environment.add_function("strftime_now", now);
}

/// Whether Python's Jinja takes a value for a sequence: texts and mappings too, but not `None`.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

fn invalid(reason: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.to_string())
}

/// The widest indentation.
const MAX_INDENT: usize = 32;

fn to_json(state: &State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let mut style = Style {
        indent: options.get("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..Style::default()
    };
    if style.indent > Some(MAX_INDENT) {
        return Err(invalid(format!("tojson indents by {MAX_INDENT} spaces at most")));
    }
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators).map_err(|_| invalid("separators must be a pair"))?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    options.assert_all_used()?;
    style.write(value, &|bytes| state.consume_fuel(bytes.div_ceil(JSON_BYTES_PER_FUEL) as u64))
}

/// `transformers` marks the assistant's words for training with `{% generation %}`; when rendering, its body is simply printed.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start + 2..].find("%}") else { break };
        let tag = &rest[start + 2..start + 2 + length];
        let name = tag.trim_matches(|character: char| character.is_whitespace() || matches!(character, '-' | '+'));
        // An `if` keeps the tag's effect on the white space around it.
        let statement = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => name,
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&tag.replacen(name, statement, 1));
        out.push_str("%}");
        rest = &rest[start + 2 + length + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::{environment, without_generation_tags};

    #[test]
    fn generation_tags_become_conditions() {
        for (source, expected) in [
            ("a{% generation %}b{%- endgeneration -%}c", "a{% if true %}b{%- endif -%}c"),
            ("{% if x %}{%}{{ y }}", "{% if x %}{%}{{ y }}"),
            ("{%%}{% generation", "{%%}{% generation"),
            ("{%}%}", "{%}%}"),
        ] {
            assert_eq!(without_generation_tags(source), expected);
        }
    }

    #[test]
    fn json_is_not_indented_without_end() {
        let render = |source: &str| environment().render_str(source, ());
        assert_eq!(render("{{ [1, [2]]|tojson(indent=2) }}").unwrap(), "[\n  1,\n  [\n    2\n  ]\n]");
        assert!(render("{{ [1]|tojson(indent=32) }}").is_ok());
        for indent in ["33", "10**12", "2**63"] {
            let error = render(&format!("{{{{ [1]|tojson(indent={indent}) }}}}")).unwrap_err().to_string();
            assert!(error.contains("32 spaces at most"), "{error}");
        }
    }
}
