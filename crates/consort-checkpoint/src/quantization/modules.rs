//! Which modules a configuration means: names, patterns, and regular expressions in lists of modules.

use std::collections::HashSet;

use fancy_regex::{Regex, RegexBuilder};

use super::Module;
use crate::error::excerpt;
use crate::huggingface::canonical;

/// Most patterns and expressions of a list, of which published ones have some hundred; names may be many.
const MAX_PATTERNS: usize = 1024;
/// What an expression may take when it is compiled, in bytes, and when it is matched, in steps.
const EXPRESSION_BYTES: usize = 256 << 10;
const EXPRESSION_STEPS: usize = 100_000;

/// A list of modules.
#[derive(Clone, Debug, Default)]
pub(super) struct Modules {
    /// Names of modules or of what contains them: `lm_head`, `self_attn`, `model.layers.0.mlp.gate`.
    names: HashSet<String>,
    /// Names with `*` and `?`.
    globs: Vec<String>,
    /// What follows `re:`, and the expression itself.
    expressions: Vec<(String, Regex)>,
    /// Names of classes, of which the tensors know nothing.
    pub classes: Vec<String>,
}

/// How a list means a module; the more exact one wins where several lists do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Match {
    Name,
    Pattern,
    Class,
}

impl Modules {
    /// Understands a list.
    ///
    /// # Errors
    /// A regular expression that is none.
    pub fn new(entries: &[impl AsRef<str>]) -> Result<Self, String> {
        let mut modules = Self::default();
        for entry in entries.iter().map(AsRef::as_ref) {
            if let Some(expression) = entry.strip_prefix("re:") {
                let mut builder = RegexBuilder::new(&format!(r"\A(?:{expression})"));
                builder.delegate_size_limit(EXPRESSION_BYTES).backtrack_limit(EXPRESSION_STEPS);
                let compiled = builder.build();
                let compiled =
                    compiled.map_err(|_| format!("{:?} is no regular expression that is read", excerpt(entry)))?;
                modules.expressions.push((entry.into(), compiled));
            } else if entry.contains(['*', '?']) {
                modules.globs.push(entry.into());
            } else if entry.starts_with(|first: char| first.is_ascii_uppercase()) && !entry.contains('.') {
                modules.classes.push(entry.into());
            } else {
                modules.names.insert(entry.into());
                // Wrappers rename what is inside them.
                modules.names.extend(canonical(&format!("{entry}.")).map(|name| name.trim_end_matches('.').into()));
            }
            if modules.expressions.len() + modules.globs.len() > MAX_PATTERNS {
                return Err(format!("has more than {MAX_PATTERNS} patterns"));
            }
        }
        Ok(modules)
    }

    /// Whether an entry is the whole name of this module.
    pub fn names(&self, module: &Module<'_>) -> bool {
        self.names.contains(&module.name)
    }

    /// The entry that means this module by its name. Patterns speak of the names in the file: a canonical name may contain what
    /// no pattern was written for (Mixtral's `w1` is a `gate_proj`).
    ///
    /// # Errors
    /// An expression that takes too long to decide.
    pub fn entry(&self, module: &Module<'_>) -> Result<Option<(Match, &str)>, String> {
        let stored = module.stored_name();
        let runs = runs(&module.name).chain(runs(&stored));
        if let Some(name) = runs.filter_map(|run| self.names.get(run)).next() {
            return Ok(Some((Match::Name, name)));
        }
        if let Some(glob) = self.globs.iter().find(|glob| matches_glob(glob, &stored)) {
            return Ok(Some((Match::Pattern, glob)));
        }
        for (entry, expression) in &self.expressions {
            let matches = expression.is_match(&stored);
            if matches.map_err(|_| format!("{:?} takes too long for {}", excerpt(entry), excerpt(&stored)))? {
                return Ok(Some((Match::Pattern, entry)));
            }
        }
        Ok(None)
    }
}

/// A name's runs of whole components, the whole name first.
fn runs(name: &str) -> impl Iterator<Item = &str> {
    let starts = std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1));
    starts.flat_map(move |start| {
        let rest = &name[start..];
        std::iter::once(rest).chain(rest.match_indices('.').map(|(end, _)| &rest[..end]))
    })
}

/// Whether a pattern of `*` and `?` describes the name, or what contains it.
fn matches_glob(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut next) = (0, 0);
    // Where the last star stands, and how much of the name it has taken.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if at == pattern.len() && (next == name.len() || name[next] == b'.') {
            return true;
        }
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, next));
                at += 1;
            }
            Some(&wanted) if next < name.len() && (wanted == b'?' || wanted == name[next]) => {
                (at, next) = (at + 1, next + 1);
            }
            _ => match star {
                Some((place, taken)) if taken < name.len() => {
                    star = Some((place, taken + 1));
                    (at, next) = (place + 1, taken + 1);
                }
                _ => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn means(entry: &str, name: &str) -> bool {
        let module = Module { name: name.into(), tensors: BTreeMap::new(), fused: false };
        Modules::new(&[entry]).unwrap().entry(&module).unwrap().is_some()
    }

    #[test]
    fn names_mean_whole_components() {
        let gate = "model.layers.1.mlp.gate";
        for entry in ["model.layers.1.mlp.gate", "mlp.gate", "gate", "model.layers.1", "model.language_model.layers.1"]
        {
            assert!(means(entry, gate), "{entry}");
        }
        for name in ["model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate", "lm_head"] {
            assert!(!means("model.layers.1.mlp.gate", name), "{name}");
        }
        assert!(!means("Linear", gate) && !means("visual", gate));
    }

    #[test]
    fn patterns_mean_what_they_match() {
        let query = "model.layers.1.self_attn.q_proj";
        for entry in [
            "*self_attn*",
            "model.layers.*.self_attn",
            "*",
            "*q_proj",
            "model.layers.?.self_attn.q_proj",
            "re:.*self_attn.*",
            "re:model",
            "re:^(?!.*mlp).*",
            "*.layers.1.*",
        ] {
            assert!(means(entry, query), "{entry}");
        }
        for entry in
            ["*mlp*", "model.layers.*.mlp", "layers*", "*self", "re:layers", "re:.*mlp", "model.layers.1?.self_attn"]
        {
            assert!(!means(entry, query), "{entry}");
        }
        for expression in
            ["re:((".to_owned(), format!("re:{}", "(".repeat(1 << 16)), "re:(((a{99}){99}){99})".to_owned()]
        {
            assert!(Modules::new(&[&expression]).unwrap_err().contains("is no regular expression that is read"));
        }
        let many: Vec<String> = (0..2000).map(|layer| format!("*layers.{layer}.*")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(Modules::new(&many[..1000]).is_ok());
        assert_eq!(Modules::new(&many).unwrap_err(), "has more than 1024 patterns");
        assert!(!means(&"*a".repeat(2000), &"a.".repeat(1000)));
    }
}
