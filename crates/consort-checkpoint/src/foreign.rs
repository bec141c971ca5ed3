//! Recognises what download tools leave behind in place of a weight file.

use crate::CheckpointError;

/// An error if these are the first bytes of a web page or of a Git LFS pointer.
pub(crate) fn recognise(start: &[u8], path: &str) -> Option<CheckpointError> {
    let text = String::from_utf8_lossy(&start[..start.len().min(512)]);
    let text = text.trim_start_matches(['\u{feff}', ' ', '\t', '\r', '\n']);
    let not_weights = |found: String, remedy: &str| {
        Some(CheckpointError::NotTheFile { path: path.into(), found, remedy: remedy.into() })
    };
    if text.starts_with("version https://git-lfs") {
        let size = text.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("unknown");
        return not_weights(
            format!("a Git LFS pointer to a file of {size} bytes"),
            "run `git lfs pull` or download the file itself",
        );
    }
    let lower = text.get(..text.len().min(64)).unwrap_or(text).to_ascii_lowercase();
    if ["<!doctype", "<html", "<head", "<?xml"].iter().any(|tag| lower.starts_with(tag)) {
        return not_weights("a web page".into(), "download the file again (is a login needed?)");
    }
    None
}
