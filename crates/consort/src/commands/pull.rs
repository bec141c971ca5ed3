//! `consort pull`: fetches a model and checks it.

use anyhow::Result;
use clap::Args;

use crate::model::ModelFiles;
use crate::output;

#[derive(Args)]
pub struct Pull {
    /// A known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    model: String,
}

impl Pull {
    pub fn run(&self) -> Result<()> {
        let model = ModelFiles::open(&self.model, None)?;
        Ok(output::text(&format!("{}\n", model.path.display()))?)
    }
}
