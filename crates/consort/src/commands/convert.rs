//! `consort convert`: a model in another number format, for this program and for others.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use clap::Args;
use consort_checkpoint::Checkpoint;
use consort_checkpoint::convert::{self, Options, Report, SHARD_BYTES, Target};
use consort_checkpoint::pull;
use consort_models::Outline;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::flags::JsonFlag;
use crate::output;
use crate::progress::Progress;

/// Weights that text shows, those with the largest errors first.
const SHOWN: usize = 10;

#[derive(Args)]
pub struct Convert {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    #[arg(short, long)]
    model: String,
    /// The format of matrices: bf16, fp8, nvfp4, mxfp4, mxfp8, affine4, affine8
    #[arg(long, value_name = "FORMAT")]
    to: Target,
    /// The directory to make, which must not exist
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Weights that stay in BF16, by parts of their path: lm_head,embed,layers.0
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    keep: Vec<String>,
    #[command(flatten)]
    json: JsonFlag,
}

/// Becomes true when the user or the system asks the program to end, which otherwise would leave a partial model behind. Who asks
/// twice is not kept waiting.
fn interruptions() -> Result<Arc<AtomicBool>> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&asked))?;
        signal_hook::flag::register(signal, Arc::clone(&asked))?;
    }
    Ok(asked)
}

impl Convert {
    pub fn run(&self) -> Result<()> {
        output::check_writable(&self.json)?;
        let path = pull::resolve(&self.model, &pull::Options::from_environment()?, &mut Progress::new())?;
        let checkpoint = Checkpoint::open(&path)?;
        // What would not load here would load nowhere.
        Outline::new(&checkpoint).with_context(|| path.display().to_string())?;
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let options = Options { target: self.to, keep: self.keep.clone(), shard_bytes: SHARD_BYTES, threads };
        let mut progress = Progress::new();
        let mut before = None;
        let interrupted = interruptions()?;
        let report = convert::convert(&checkpoint, &options, &self.output, &mut |done, total| {
            if before.is_none() {
                progress.begin("converting", Some(total));
            }
            progress.advance(done - before.replace(done).unwrap_or(0));
            if interrupted.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        progress.finish();
        let report = report?;
        for note in &report.notes {
            eprintln!("note: {note}");
        }
        if !self.json.takes_stdout() {
            output::text(&self.text(&report))?;
        }
        output::json(&self.json, &report)
    }

    fn text(&self, report: &Report) -> String {
        let mut worst: Vec<_> = report.tensors.iter().collect();
        worst.sort_by(|a, b| b.relative_rms_error.total_cmp(&a.relative_rms_error));
        let rows: Vec<Vec<String>> = worst
            .iter()
            .take(SHOWN)
            .map(|tensor| {
                let error = format!("{:.2e}", tensor.relative_rms_error);
                vec![tensor.name.clone(), tensor.from.clone(), tensor.to.clone(), output::size(tensor.bytes), error]
            })
            .collect();
        format!(
            "{}: {} weights, {} before and {} after ({:.2} times)\n\nlargest errors\n{}",
            self.output.display(),
            report.tensors.len(),
            output::size(report.source_bytes),
            output::size(report.output_bytes),
            report.output_bytes as f64 / report.source_bytes.max(1) as f64,
            output::table(&["weight", "from", "to", "bytes", "relative RMS error"], &rows),
        )
    }
}
