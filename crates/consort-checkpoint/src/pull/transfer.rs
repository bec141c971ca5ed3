//! One file over HTTP, in as many pieces as it takes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::http::{Response, header};
use ureq::{Agent, Body};

use super::cache::{BUFFER_BYTES, Expected, Partial};
use super::{Progress, PullError};

/// Requests without a single new byte after which a download is given up.
const FRUITLESS_REQUESTS: u32 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// A server that stays silent for so long is asked again.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Asks a hub for files.
pub(super) struct Client {
    agent: Agent,
    token: Option<String>,
    retry_pause: Duration,
}

/// How one request ended, if not with an error that repeating won't mend.
enum Outcome {
    Whole,
    Cut(String),
}

impl Client {
    pub(super) fn new(token: Option<String>, retry_pause: Duration) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Large files are served from elsewhere; the token is for the hub alone.
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(READ_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .user_agent(concat!("consort/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.into(), token, retry_pause }
    }

    /// Downloads `url` to `path` by way of `partial_path`, which may hold the beginning.
    pub(super) fn download(
        &self,
        url: &str,
        partial_path: PathBuf,
        path: &Path,
        expected: &Expected,
        progress: &mut dyn Progress,
    ) -> Result<(), PullError> {
        let mut partial = Partial::open(partial_path, expected)?;
        progress.begin(expected.file, Some(expected.bytes));
        progress.advance(partial.bytes);
        let mut fruitless = 0;
        while partial.bytes < expected.bytes {
            let before = partial.bytes;
            let reason = match self.request(url, &mut partial, expected, progress)? {
                Outcome::Whole => break,
                Outcome::Cut(reason) => reason,
            };
            fruitless = if partial.bytes > before { 0 } else { fruitless + 1 };
            if fruitless == FRUITLESS_REQUESTS {
                return Err(PullError::Network { name: expected.file.to_owned(), reason });
            }
            std::thread::sleep(self.retry_pause * 2_u32.pow(fruitless) / 2);
        }
        partial.complete(path)?;
        progress.finish();
        Ok(())
    }

    /// Sends one request for what is missing, and takes what comes.
    fn request(
        &self,
        url: &str,
        partial: &mut Partial,
        expected: &Expected,
        progress: &mut dyn Progress,
    ) -> Result<Outcome, PullError> {
        let start = partial.bytes;
        let mut request = self.agent.get(url).header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        let mut response = match request.call() {
            Ok(response) => response,
            Err(error) => return Ok(Outcome::Cut(error.to_string())),
        };
        match response.status().as_u16() {
            // A server that doesn't know ranges sends everything again.
            200 if start > 0 => {
                partial.restart()?;
                progress.begin(expected.file, Some(expected.bytes));
            }
            200 => {}
            206 if range_start(&response) == Some(start) => {}
            206 | 416 => {
                partial.restart()?;
                return Ok(Outcome::Cut("the server sent another part than the one asked for".to_owned()));
            }
            status => return refusal(expected.file, status),
        }
        let kind = header_text(&response, header::CONTENT_TYPE).unwrap_or_default();
        if kind.starts_with("text/html") && !expected.file.ends_with(".html") {
            return Err(partial.damaged("a web page came instead (a proxy or a login page?)".to_owned()));
        }
        let mut reader = response.body_mut().as_reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match std::io::Read::read(&mut reader, &mut buffer) {
                Ok(0) if partial.bytes == expected.bytes => return Ok(Outcome::Whole),
                Ok(0) => return Ok(Outcome::Cut("the connection was closed".to_owned())),
                Ok(count) => {
                    partial.write(&buffer[..count])?;
                    progress.advance(count as u64);
                }
                Err(error) => return Ok(Outcome::Cut(error.to_string())),
            }
        }
    }
}

/// What a status other than success means for a download.
fn refusal(name: &str, status: u16) -> Result<Outcome, PullError> {
    match status {
        408 | 429 | 500..=599 => Ok(Outcome::Cut(format!("HTTP {status}"))),
        status => Err(status_error(name, status)),
    }
}

/// What a status other than success means.
pub(super) fn status_error(name: &str, status: u16) -> PullError {
    let name = name.to_owned();
    match status {
        401 | 403 => PullError::Denied { name, status },
        404 | 410 => PullError::NotFound { name },
        status => PullError::Network { name, reason: format!("HTTP {status}") },
    }
}

fn header_text(response: &Response<Body>, name: header::HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

/// Where the part begins that a response brings: `bytes 100-199/200` -> 100.
fn range_start(response: &Response<Body>) -> Option<u64> {
    let range = header_text(response, header::CONTENT_RANGE)?.trim().strip_prefix("bytes ")?;
    range.split_once('-')?.0.trim().parse().ok()
}
