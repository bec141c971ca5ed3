//! Makes operators pay for what they compute, before they do.
//!
//! A list of shared parts takes next to no memory, and its text any amount. The engine makes such a text without asking anybody where a
//! list is joined to a text (`list ~ 'a'`), looked for in one (`list in 'a'`), or is the key of a mapping (`{list: 1}`, where it is not
//! written but walked through). Operators cannot be replaced, but templates can: the changes here alter no result.

use minijinja::machinery::{Token, tokenize};

use super::environment::syntax;

/// The filter that gives a value back when its text has been paid for.
pub(super) const PAID: &str = "consort_paid";

/// Behind `~`. Where one of two texts is marked as safe and the other is not, the engine writes the other as if it were printed, which
/// is paid for beforehand.
const SAFE: &str = " ''|safe ~";

/// Tokens of one tag, and `elif`s of a template. The engine goes one call deeper for each of either, and ends the process where the
/// stack does. Published templates stay far below.
const MOST_TOKENS: usize = 1000;
const MOST_BRANCHES: usize = 250;

/// Words that end what stands before them and begin something else.
const WORDS: [&str; 7] = ["and", "or", "not", "if", "else", "elif", "in"];

/// An open bracket, or a whole statement.
struct Frame {
    is_mapping: bool,
    /// Where the operand of a comparison begins that the next token may belong to.
    operand: usize,
    /// Where the item, or the key, begins.
    item: usize,
}

/// The template with payments put in.
///
/// # Errors
/// A template that decides for itself about escaping, on which [`SAFE`] relies; none that is published does. One whose tags are too
/// long, or have too many branches.
pub(super) fn charged(source: &str) -> Result<String, String> {
    let mut insertions: Vec<(usize, String)> = Vec::new();
    let mut pay_for = |start: usize, end: usize| {
        insertions.push((start, "(".to_owned()));
        insertions.push((end, format!(")|{PAID} ")));
    };
    let mut tildes = Vec::new();
    let mut frames: Vec<Frame> = Vec::new();
    // Of the last tokens: where they begin, and words.
    let (mut before_last, mut last) = ((0, ""), (0, ""));
    let (mut is_tag, mut is_loop) = (false, false);
    let (mut tokens, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax()) {
        // What is no Jinja is refused with more words when it is compiled.
        let Ok((token, span)) = token else { break };
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        let word = match token {
            Token::Ident(word) => word,
            Token::Dot => ".",
            _ => "",
        };
        let opened = |is_mapping| Frame { is_mapping, operand: end, item: end };
        match token {
            Token::VariableStart | Token::BlockStart => {
                frames = vec![opened(false)];
                (is_loop, tokens) = (false, 0);
            }
            Token::Ident("elif") if is_tag => branches += 1,
            Token::ParenOpen | Token::BracketOpen => frames.push(opened(false)),
            Token::BraceOpen => frames.push(opened(true)),
            Token::ParenClose | Token::BracketClose | Token::BraceClose if frames.len() > 1 => _ = frames.pop(),
            Token::Tilde => tildes.push((end, SAFE.to_owned())),
            Token::Ident("autoescape") if is_tag => return Err("autoescape is not supported".to_owned()),
            _ => {}
        }
        tokens += 1;
        if tokens > MOST_TOKENS {
            return Err(format!("an expression of more than {MOST_TOKENS} words and signs is not supported"));
        }
        if branches > MOST_BRANCHES {
            return Err(format!("more than {MOST_BRANCHES} elif are not supported"));
        }
        let depth = frames.len();
        if let Some(frame) = frames.last_mut() {
            let is_operator = WORDS.contains(&word) && last.1 != ".";
            let is_test = last.1 == "is" || last.1 == "not" && before_last.1 == "is";
            match token {
                _ if is_tag => frame.operand = end,
                Token::Ident("in") if is_loop && depth == 1 => (is_loop, frame.operand) = (false, end),
                Token::Ident("in") if is_operator && !is_test => {
                    pay_for(frame.operand, if last.1 == "not" { last.0 } else { start });
                    frame.operand = end;
                }
                // What follows `not` is not looked for in anything, unless it is `in`.
                Token::Ident("not") if is_operator && last.1 != "is" && begins_operand(source, end, "in") => {}
                Token::Ident(_) if is_operator && !is_test => frame.operand = end,
                Token::Colon if frame.is_mapping => {
                    pay_for(frame.item, start);
                    (frame.operand, frame.item) = (end, end);
                }
                Token::Comma | Token::Colon => (frame.operand, frame.item) = (end, end),
                Token::Assign | Token::Eq | Token::Ne | Token::Lt | Token::Lte | Token::Gt | Token::Gte => {
                    frame.operand = end;
                }
                _ => {}
            }
        }
        is_loop |= is_tag && word == "for";
        is_tag = matches!(token, Token::BlockStart);
        (before_last, last) = (last, (start, word));
    }
    insertions.extend(tildes);
    // What is put in at one place stays in order: closing what begins before, then opening.
    insertions.sort_by_key(|(at, text)| (*at, text == "("));
    let (mut out, mut copied) = (String::with_capacity(source.len()), 0);
    for (at, text) in insertions {
        out.push_str(&source[copied..at]);
        out.push_str(&text);
        copied = at;
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// Whether the next word is `word`.
fn begins_operand(source: &str, at: usize, word: &str) -> bool {
    let rest = source[at..].trim_start();
    rest.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_'))
}

#[cfg(test)]
mod tests {
    use super::charged;

    #[test]
    fn payments_alter_nothing_else() {
        for (source, expected) in [
            ("{{ a ~ b }} ~ {# a ~ b in c #}{{ 'a ~ in' }}", "{{ a ~ ''|safe ~ b }} ~ {# a ~ b in c #}{{ 'a ~ in' }}"),
            ("{% for a in b if a.in not in c %}", "{% for a in b if( a.in )|consort_paid not in c %}"),
            ("{% if not a + b in c and d is in(e) %}", "{% if not( a + b )|consort_paid in c and d is in(e) %}"),
            (
                "{% set x = f(a, b in c) if d in e else g %}",
                "{% set x = f(a,( b )|consort_paid in c) if( d )|consort_paid in e else g %}",
            ),
            ("{{ {'a': 1, b: c[1:2]}[d] }}", "{{ {('a')|consort_paid : 1,( b)|consort_paid : c[1:2]}[d] }}"),
            ("{{ {a if b in c else d: 1} }}", "{{ {(a if( b )|consort_paid in c else d)|consort_paid : 1} }}"),
            ("{% raw %}{{ a in b }}{% endraw %}", "{% raw %}{{ a in b }}{% endraw %}"),
            ("{{ a == b in c }}", "{{ a ==( b )|consort_paid in c }}"),
            ("{{ a is not defined in b }}", "{{( a is not defined )|consort_paid in b }}"),
        ] {
            assert_eq!(charged(source).unwrap(), expected);
        }
        assert!(charged("{% autoescape false %}").is_err() && charged("{{ autoescape }}").is_ok());
    }
}
