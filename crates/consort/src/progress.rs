//! How far a long piece of work has come: a bar on a terminal, a line now and then where there is none.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(3);

/// Progress through bytes, of one thing after another.
pub struct Progress {
    bar: ProgressBar,
    begin: Instant,
    last_line: Instant,
}

impl Progress {
    /// Nothing to show yet.
    pub fn new() -> Self {
        Self { bar: ProgressBar::hidden(), begin: Instant::now(), last_line: Instant::now() }
    }

    /// Begins to show `what`; `total_bytes` if known.
    pub fn begin(&mut self, what: &str, total_bytes: Option<u64>) {
        self.finish();
        self.bar = ProgressBar::new(total_bytes.unwrap_or(0));
        let template = match total_bytes {
            Some(_) => "{msg} {bar:30} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left",
            None => "{msg} {spinner} {decimal_bytes}, {decimal_bytes_per_sec}",
        };
        // The templates are constants; should one be wrong, the default shows as much.
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        self.bar.set_message(what.to_owned());
        (self.begin, self.last_line) = (Instant::now(), Instant::now());
    }

    /// So many more bytes are done.
    pub fn advance(&mut self, bytes: u64) {
        self.bar.inc(bytes);
        self.line();
    }

    /// So many bytes are done, of so many as far as that is known now.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        self.bar.set_length(total_bytes);
        self.bar.set_position(done_bytes);
        self.line();
    }

    /// What the bar would show, where there is no terminal.
    fn line(&mut self) {
        if !self.bar.is_hidden() || self.last_line.elapsed() < LINE_EVERY {
            return;
        }
        self.last_line = Instant::now();
        let done = self.bar.position();
        let rate = done as f64 / self.begin.elapsed().as_secs_f64();
        let rest = match self.bar.length().filter(|total| *total > 0) {
            Some(total) => {
                let left_s = total.saturating_sub(done) as f64 / rate.max(1.0);
                format!(" of {}, {}/s, {left_s:.0} s left", output::size(total), output::size(rate as u64))
            }
            None => format!(", {}/s", output::size(rate as u64)),
        };
        eprintln!("{}: {}{rest}", self.bar.message(), output::size(done));
    }

    /// It is done.
    pub fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl consort_checkpoint::pull::Progress for Progress {
    fn begin(&mut self, file: &str, total_bytes: Option<u64>) {
        self.begin(&format!("fetching {file}"), total_bytes);
    }

    fn advance(&mut self, bytes: u64) {
        self.advance(bytes);
    }

    fn finish(&mut self) {
        self.finish();
    }
}
