//! Standard output: text, or one JSON object. Everything else goes to standard error.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::flags::JsonFlag;

/// Writes text to standard output at once. An error names it, and keeps its kind.
pub fn text(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(unwritable)
}

/// Writes the help or the version that was asked for, in colours where they show.
pub fn help(answer: &clap::Error) -> io::Result<()> {
    answer.print().and_then(|()| io::stdout().flush()).map_err(unwritable)
}

/// An error of standard output, named.
fn unwritable(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("standard output: {error}"))
}

/// Writes the object where the flag says.
pub fn json(flag: &JsonFlag, object: &impl Serialize) -> Result<()> {
    let Some(path) = &flag.json else { return Ok(()) };
    let mut line = serde_json::to_string(object)?;
    line.push('\n');
    if flag.takes_stdout() {
        return Ok(text(&line)?);
    }
    std::fs::write(path, line).with_context(|| path.display().to_string())
}

/// Refuses a file that could not be written, before a long run rather than after it.
pub fn check_writable(flag: &JsonFlag) -> Result<()> {
    let Some(path) = flag.json.as_deref().filter(|_| !flag.takes_stdout()) else { return Ok(()) };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(directory.is_dir(), "{}: there is no directory {}", path.display(), directory.display());
    anyhow::ensure!(!path.is_dir(), "{}: this is a directory; name a file", path.display());
    Ok(())
}

/// A table with a heading line; columns are as wide as their widest cell, and all but the first are set to the right.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heading[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut heading.iter().copied());
    text.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    text
}

/// A size for people: `98.4 MB` (powers of ten).
pub fn size(bytes: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let bytes = bytes as f64;
    match UNITS.into_iter().find(|(scale, _)| bytes >= *scale) {
        Some((scale, unit)) => format!("{:.1} {unit}", bytes / scale),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["tensor:2".to_owned(), "7".to_owned()], vec!["μ".to_owned(), "123456".to_owned()]];
        assert_eq!(table(&["plan", "tok/s"], &rows), "plan       tok/s\ntensor:2       7\nμ         123456\n");
    }

    #[test]
    fn sizes_are_readable() {
        let sizes = [0, 999_999, 98_362_432, 2_000_000_000_000].map(size);
        assert_eq!(sizes, ["0 bytes", "1000.0 kB", "98.4 MB", "2.0 TB"]);
    }
}
