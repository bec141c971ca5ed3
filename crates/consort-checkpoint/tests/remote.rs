//! Files that lie on another machine: a checkpoint opened over them reads the same as one on this machine, fetches only what
//! it reads, and keeps what it fetched for later runs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use consort_checkpoint::remote::{Delivery, Fetch, RemoteFiles, Request, Traffic, answer};
use consort_checkpoint::{Checkpoint, CheckpointError};

/// Another machine, and what goes wrong with it.
struct Peer {
    checkpoint: Checkpoint,
    flips_a_bit: AtomicBool,
    requests: Mutex<Vec<Request>>,
}

#[derive(Clone)]
struct Connection(Arc<Peer>);

impl Fetch for Connection {
    fn fetch(&self, request: Request) -> Result<Delivery, CheckpointError> {
        let Peer { checkpoint, flips_a_bit, requests } = &*self.0;
        let mut bytes = Vec::new();
        let name = &checkpoint.manifest().files[request.file].name;
        let sha256 = answer(checkpoint.source(), name, &request, &mut bytes)?;
        if flips_a_bit.load(Ordering::Relaxed) {
            bytes[0] ^= 0x10;
        }
        requests.lock().unwrap().push(request);
        Ok(Delivery { bytes, sha256, from: "rank 0 (m1)".into() })
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name)
}

fn peer(path: &Path) -> Connection {
    let checkpoint = Checkpoint::open(path).unwrap();
    Connection(Arc::new(Peer { checkpoint, flips_a_bit: false.into(), requests: Mutex::default() }))
}

fn open(peer: &Connection, keep: Option<&Path>) -> Result<(Checkpoint, Arc<RemoteFiles>), CheckpointError> {
    let manifest = peer.0.checkpoint.manifest();
    let files = Arc::new(RemoteFiles::open(manifest, "model", keep, Box::new(peer.clone()))?);
    Ok((Checkpoint::open_source(Box::new(files.clone()))?, files))
}

/// Every weight: whole, some rows, some columns.
fn assert_reads_alike(ours: &Checkpoint, theirs: &Checkpoint) {
    for tensor in theirs.tensors() {
        let columns = tensor.shape.last().copied().unwrap_or(1);
        let rows: usize = tensor.shape.iter().rev().skip(1).product();
        let block = tensor.format.block_values();
        let mut selections = vec![(0..rows, None), (rows / 3..rows / 2 + 1, None)];
        if columns > block {
            selections.push((0..rows, Some(block..columns / block * block)));
        }
        for (rows, columns) in selections {
            let read = |checkpoint: &Checkpoint| {
                let columns = columns.as_ref().map(std::slice::from_ref);
                let matrix = checkpoint.read(&[&tensor.name], std::slice::from_ref(&rows), columns).unwrap();
                (matrix.data.into_owned(), matrix.row_scale)
            };
            assert!(read(ours) == read(theirs), "{} rows {rows:?} columns {columns:?}", tensor.name);
        }
    }
}

#[test]
fn a_checkpoint_reads_the_same_over_the_wire() {
    for name in ["llama", "llama-fp8-block", "llama-gptq", "llama-gguf", "llama-gguf-split", "qwen3_moe-nvfp4-mlx"] {
        let path = fixture(name);
        let gguf = || std::fs::read_dir(&path).unwrap().map(|it| it.unwrap().path());
        let path = match gguf().find(|file| file.extension().is_some_and(|it| it == "gguf")) {
            Some(file) if name == "llama-gguf" => file,
            _ => path,
        };
        let peer = peer(&path);
        let (checkpoint, files) = open(&peer, None).unwrap();
        assert_eq!(checkpoint.manifest(), peer.0.checkpoint.manifest(), "{name}");
        assert_eq!(checkpoint.config(), peer.0.checkpoint.config(), "{name}");
        assert_reads_alike(&checkpoint, &peer.0.checkpoint);
        assert!(files.path().exists(), "{name}");
        let directory = if files.path().is_dir() { files.path() } else { files.path().parent().unwrap().to_owned() };
        drop((checkpoint, files));
        assert!(!directory.exists(), "nothing is left behind");
    }
}

#[test]
fn only_the_bytes_of_a_part_are_fetched() {
    let peer = peer(&fixture("llama"));
    let (checkpoint, files) = open(&peer, None).unwrap();
    let before = files.traffic().fetched_bytes;
    let headers: u64 = peer.0.checkpoint.manifest().files.iter().map(|file| file.header_bytes).sum();
    assert_eq!(before, headers);
    let name = "model.layers.0.mlp.down_proj.weight";
    let shape = &checkpoint.tensor(name).unwrap().shape;
    let (rows, half) = (shape[0], shape[1] / 2);
    let whole = 0..rows;
    checkpoint.read(&[name], std::slice::from_ref(&whole), Some(std::slice::from_ref(&(half..2 * half)))).unwrap();
    let bytes = (rows * checkpoint.tensor(name).unwrap().format.row_bytes(half)) as u64;
    assert_eq!(files.traffic().fetched_bytes - before, bytes);
    assert_eq!(peer.0.requests.lock().unwrap().last().unwrap().runs.len(), 1, "a block of columns is one run");
}

#[test]
fn what_was_kept_is_not_fetched_again_by_another_plan() {
    let keep = tempfile::tempdir().unwrap();
    let peer = peer(&fixture("llama"));
    let name = "model.layers.0.mlp.down_proj.weight";
    let read = |part: std::ops::Range<usize>, by_columns: bool| -> (Vec<u8>, Traffic) {
        let (checkpoint, files) = open(&peer, Some(keep.path())).unwrap();
        let shape = checkpoint.tensor(name).unwrap().shape.clone();
        let (rows, columns) = if by_columns { (0..shape[0], part) } else { (part, 0..shape[1]) };
        let before = files.traffic();
        let matrix =
            checkpoint.read(&[name], std::slice::from_ref(&rows), Some(std::slice::from_ref(&columns))).unwrap();
        let bytes = matrix.data.into_owned();
        let expected = peer.0.checkpoint.read(&[name], &[rows], Some(&[columns])).unwrap().data.into_owned();
        assert!(bytes == expected);
        let after = files.traffic();
        let fetched_bytes = after.fetched_bytes - before.fetched_bytes;
        let kept_bytes = after.kept_bytes - before.kept_bytes;
        (bytes, Traffic { fetched_bytes, kept_bytes, damaged_bytes: after.damaged_bytes })
    };
    let (bytes, traffic) = read(0..64, true);
    let block = bytes.len() as u64;
    assert_eq!(traffic, Traffic { fetched_bytes: block, kept_bytes: 0, damaged_bytes: 0 });
    assert_eq!(read(0..64, true).1, Traffic { fetched_bytes: 0, kept_bytes: block, damaged_bytes: 0 });
    // By rows, part of what is needed is here.
    let (bytes, traffic) = read(10..20, false);
    assert_eq!(traffic.fetched_bytes + traffic.kept_bytes, bytes.len() as u64);
    assert_eq!(traffic.kept_bytes, 10 * 64 * 2);
    assert_eq!(read(10..20, false).1.fetched_bytes, 0);

    // A damaged byte is noticed and its range fetched again; a log that was cut in a line is still a log.
    let directory = std::fs::read_dir(keep.path()).unwrap().next().unwrap().unwrap().path();
    let log = directory.join("consort-kept.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    std::fs::write(&log, &text[..text.len() - 5]).unwrap();
    let weights = directory.join("model.safetensors");
    let mut content = std::fs::read(&weights).unwrap();
    let manifest = peer.0.checkpoint.manifest();
    let header = manifest.files.iter().find(|file| file.name == "model.safetensors").unwrap().header_bytes as usize;
    let at = header + content[header..].iter().position(|&byte| byte != 0).unwrap();
    content[at] ^= 1;
    std::fs::write(&weights, &content).unwrap();
    let (_, traffic) = read(0..64, true);
    assert_eq!((traffic.fetched_bytes, traffic.damaged_bytes), (block, block));
    assert_eq!(read(0..64, true).1.fetched_bytes, 0, "it was kept again");
}

#[test]
fn a_flipped_bit_on_the_way_names_file_and_rank() {
    let peer = peer(&fixture("llama"));
    let (checkpoint, _files) = open(&peer, None).unwrap();
    peer.0.flips_a_bit.store(true, Ordering::Relaxed);
    let error = checkpoint.read_f32("model.norm.weight").unwrap_err().to_string();
    assert!(error.contains("model.safetensors: what rank 0 (m1) sent is damaged"), "{error}");
    let error = open(&peer, None).err().unwrap().to_string();
    assert!(error.contains("what rank 0 (m1) sent is damaged"), "{error}");
}

#[test]
fn senseless_requests_are_refused() {
    use consort_checkpoint::remote::Run;
    let checkpoint = Checkpoint::open(&fixture("llama")).unwrap();
    let ask =
        |name: &str, runs: Vec<Run>| answer(checkpoint.source(), name, &Request { file: 0, runs }, &mut Vec::new());
    let size = checkpoint.source().files()[checkpoint.source().find("config.json").unwrap()].bytes;
    let run = |start, length, stride, count| Run { start, length, stride, count };
    assert!(ask("config.json", vec![run(0, size, size, 1)]).is_ok());
    for runs in [vec![run(0, size + 1, size + 1, 1)], vec![run(1, 1, u64::MAX, 9)], vec![run(0, 1, 0, 1 << 30)]] {
        assert!(matches!(ask("config.json", runs), Err(CheckpointError::Malformed { .. })));
    }
    assert!(ask("../llama/config.json", vec![run(0, 1, 1, 1)]).is_err());
}

/// What stands in the directory of kept files under a name that is about to be written.
#[test]
fn nothing_is_written_through_links_in_the_directory_of_kept_files() {
    use std::fs;
    use std::os::unix::fs::symlink;

    let peer = peer(&fixture("llama"));
    let (keep, victims) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    drop(open(&peer, Some(keep.path())).unwrap());
    let directory = fs::read_dir(keep.path()).unwrap().next().unwrap().unwrap().path();
    let names = ["config.json", "model.safetensors", "consort-kept.jsonl"];
    let victim = |name: &str| victims.path().join(name);
    let refused = |what: &str| {
        let error = open(&peer, Some(keep.path())).err().unwrap_or_else(|| panic!("{what} was written through"));
        error.to_string()
    };
    for name in names {
        let path = directory.join(name);
        fs::remove_file(&path).unwrap();
        fs::write(victim(name), "mine").unwrap();
        for (what, plant) in [
            ("a symbolic link", &(|| symlink(victim(name), &path)) as &dyn Fn() -> std::io::Result<()>),
            ("a symbolic link", &|| symlink(victim("absent"), &path)),
            ("a hard link", &|| fs::hard_link(victim(name), &path)),
        ] {
            plant().unwrap();
            let message = refused(name);
            assert!(message.contains(&format!("{}: is {what}", path.display())), "{message}");
            assert_eq!(fs::read_to_string(victim(name)).unwrap(), "mine");
            assert!(!victim("absent").exists());
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        assert!(refused(name).contains(name), "a directory");
        fs::remove_dir(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success() && refused(name).contains(name), "a pipe");
        fs::remove_file(&path).unwrap();
        drop(open(&peer, Some(keep.path())).unwrap());
    }
    // The directory itself.
    fs::rename(&directory, victim("moved")).unwrap();
    symlink(victim("moved"), &directory).unwrap();
    let before = fs::metadata(victim("moved/consort-kept.jsonl")).unwrap().len();
    let message = refused("the directory");
    assert!(message.contains("leaves the model's directory"), "{message}");
    assert_eq!(fs::metadata(victim("moved/consort-kept.jsonl")).unwrap().len(), before);
}

#[test]
fn further_chat_templates_come_along() {
    let model = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama").join(file), model.path().join(file)).unwrap();
    }
    let templates = model.path().join("additional_chat_templates");
    std::fs::create_dir(&templates).unwrap();
    std::fs::write(model.path().join("chat_template.jinja"), "plain").unwrap();
    std::fs::write(templates.join("tool_use.jinja"), "with tools").unwrap();
    std::fs::write(templates.join("README.md"), "no template").unwrap();
    let there = peer(model.path());
    let (checkpoint, files) = open(&there, None).unwrap();
    let names: Vec<_> = checkpoint.manifest().files.iter().map(|file| file.name.as_str()).collect();
    let expected =
        ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json", "model.safetensors"];
    assert_eq!(names, expected);
    let chat = consort_checkpoint::chat::ChatTemplate::open(&files.path()).unwrap().unwrap();
    assert_eq!((chat.source(true), chat.source(false)), ("with tools", "plain"));
    // Another one is another model.
    std::fs::write(templates.join("tool_use.jinja"), "with other tools").unwrap();
    let difference = checkpoint.manifest().diff(Checkpoint::open(model.path()).unwrap().manifest()).unwrap();
    assert_eq!(difference.file, "additional_chat_templates/tool_use.jinja");
    // A link out of the directory is refused like any other.
    std::os::unix::fs::symlink("/etc/hostname", templates.join("x.jinja")).unwrap();
    assert!(Checkpoint::open(model.path()).err().unwrap().to_string().contains("leaves the model's directory"));
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let peer = peer(&fixture("llama"));
    for name in ["../x", "a/b", "additional_chat_templates/../x.jinja", "additional_chat_templates/x", "/x", "..", ""] {
        let mut manifest = peer.0.checkpoint.manifest().clone();
        manifest.files[0].name = name.to_owned();
        let error = RemoteFiles::open(&manifest, "model", None, Box::new(peer.clone())).err().unwrap();
        assert!(matches!(error, CheckpointError::Escapes { .. }), "{name:?}: {error}");
    }
}
