//! Stand-in until the real one lands.
use std::path::PathBuf;
pub const DEFAULT_MODEL: &str = "smollm2";
pub trait Progress {
    fn begin(&mut self, file: &str, total_bytes: Option<u64>);
    fn advance(&mut self, bytes: u64);
    fn finish(&mut self);
}
pub struct Options;
impl Options {
    pub fn from_environment() -> anyhow::Result<Self> {
        Ok(Self)
    }
}
pub fn resolve(name: &str, _: &Options, _: &mut dyn Progress) -> anyhow::Result<PathBuf> {
    anyhow::ensure!(std::path::Path::new(name).exists(), "no model {name:?}");
    Ok(name.into())
}
