//! Ranks as real processes: a test starts its own binary again, once per rank, with a program to run.
#![allow(dead_code, missing_docs)] // Each test binary uses its own part of this.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use consort_fabric::{
    Agreement, Algorithm, ClusterKey, Fabric, FabricError, FabricOptions, ReservedPort, TransportChoice, Wire,
};

/// Warnings of this process.
pub static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// What a rank is told.
pub struct Order {
    pub program: String,
    pub options: FabricOptions,
    pub argument: String,
}

impl Order {
    /// The order of this process, if it was started as a rank.
    pub fn received() -> Option<Self> {
        let get = |name: &str| std::env::var(format!("FABRIC_TEST_{name}")).ok();
        let number = |name: &str| get(name).unwrap().parse::<u64>().unwrap();
        let transport = match get("TRANSPORT")?.as_str() {
            "shm" => TransportChoice::Shm,
            "tcp" => TransportChoice::Tcp,
            "rdma" => TransportChoice::Rdma,
            _ => TransportChoice::Auto,
        };
        let rails = number("RAILS") as usize;
        let rail_addresses = if rails == 0 { Vec::new() } else { vec!["127.0.0.1".parse().unwrap(); rails] };
        let options = FabricOptions {
            rank: number("RANK") as usize,
            size: number("SIZE") as usize,
            rendezvous: get("RENDEZVOUS").unwrap(),
            bind: None,
            host: format!("host{}", number("RANK")),
            run_id: get("RUN").unwrap(),
            transport,
            rail_addresses,
            rdma_devices: Vec::new(),
            connect_timeout: Duration::from_millis(number("CONNECT_MS")),
            hang_timeout: Duration::from_millis(number("HANG_MS")),
            operation_timeout: Duration::from_secs(60),
            key: get("KEY").and_then(|key| ClusterKey::from_hex(&key)),
            encrypt: get("ENCRYPT").unwrap() == "true",
            wire: if get("WIRE").unwrap() == "bf16" { Wire::Bf16 } else { Wire::Full },
            algorithm: match get("ALGORITHM").unwrap().as_str() {
                "direct" => Algorithm::Direct,
                "scatter" => Algorithm::Scatter,
                "line" => Algorithm::Line,
                _ => Algorithm::Auto,
            },
            emulate: get("EMULATE").map(|link| link.parse().unwrap()),
            checksums: get("CHECKSUMS").unwrap() == "true",
            warn: |_| _ = WARNINGS.fetch_add(1, Ordering::Relaxed),
            agreement: Agreement { items: vec![("plan".into(), get("PLAN").unwrap())] },
        };
        Some(Self { program: get("PROGRAM")?, options, argument: get("ARGUMENT").unwrap() })
    }

    pub fn connect(&self) -> Result<Fabric, FabricError> {
        Fabric::connect(self.options.clone())
    }
}

/// How to start the ranks of a run.
#[derive(Clone)]
pub struct Run {
    pub program: &'static str,
    pub size: usize,
    pub transport: &'static str,
    pub argument: String,
    pub rails: usize,
    pub checksums: bool,
    pub encrypt: bool,
    pub emulate: Option<&'static str>,
    pub wire: &'static str,
    pub algorithm: &'static str,
    /// The digit that fills each rank's key.
    pub key: fn(usize) -> Option<char>,
    pub hang_ms: u64,
    pub connect_ms: u64,
    pub rendezvous: String,
    /// Keeps the port of the rendezvous.
    pub port: Arc<ReservedPort>,
    /// The `plan` item of each rank's agreement.
    pub plan: fn(usize) -> &'static str,
}

impl Run {
    pub fn new(program: &'static str, size: usize, transport: &'static str) -> Self {
        let port = ReservedPort::of([127, 0, 0, 1].into()).unwrap();
        Self {
            program,
            size,
            transport,
            argument: String::new(),
            rails: 1,
            checksums: false,
            encrypt: false,
            emulate: None,
            wire: "full",
            algorithm: "auto",
            key: |_| None,
            hang_ms: 10_000,
            connect_ms: 60_000,
            rendezvous: port.address().to_string(),
            port: Arc::new(port),
            plan: |_| "same",
        }
    }

    pub fn start_rank(&self, rank: usize) -> Rank {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["rank_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        let settings = [
            ("PROGRAM", self.program.to_owned()),
            ("RANK", rank.to_string()),
            ("SIZE", self.size.to_string()),
            ("TRANSPORT", self.transport.to_owned()),
            ("ARGUMENT", self.argument.clone()),
            ("RAILS", self.rails.to_string()),
            ("ENCRYPT", self.encrypt.to_string()),
            ("WIRE", self.wire.to_owned()),
            ("ALGORITHM", self.algorithm.to_owned()),
            ("CHECKSUMS", self.checksums.to_string()),
            ("HANG_MS", self.hang_ms.to_string()),
            ("CONNECT_MS", self.connect_ms.to_string()),
            ("RENDEZVOUS", self.rendezvous.clone()),
            ("RUN", format!("run-{}", self.port.address())),
            ("PLAN", (self.plan)(rank).to_owned()),
        ];
        for (name, value) in settings {
            command.env(format!("FABRIC_TEST_{name}"), value);
        }
        if let Some(digit) = (self.key)(rank) {
            command.env("FABRIC_TEST_KEY", digit.to_string().repeat(64));
        }
        if let Some(link) = self.emulate {
            command.env("FABRIC_TEST_EMULATE", link);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Rank { child, output, ended: None, _port: self.port.clone() }
    }

    pub fn start(&self) -> Vec<Rank> {
        (0..self.size).map(|rank| self.start_rank(rank)).collect()
    }

    /// Runs all ranks to their end; all must succeed. Returns what each reported.
    pub fn succeed(&self) -> Vec<String> {
        self.start().into_iter().map(|mut rank| rank.report(Duration::from_secs(120))).collect()
    }
}

/// A running rank. Killed when dropped, so that a failing test leaves nothing behind.
pub struct Rank {
    child: Child,
    output: BufReader<ChildStdout>,
    ended: Option<Instant>,
    _port: Arc<ReservedPort>,
}

impl Rank {
    pub fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so its id is still its own.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Waits until the rank has announced itself with [`announce`].
    pub fn wait_until_up(&mut self) {
        let mut line = String::new();
        while !line.contains("RANK IS UP") {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "a rank ended before it was up");
        }
    }

    /// When the process ended; panics if it has not after `patience`.
    pub fn ended(&mut self, patience: Duration) -> Instant {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < patience, "a rank did not end within {patience:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        *self.ended.get_or_insert_with(Instant::now)
    }

    /// What the rank reported: the text after `REPORT:` in its output.
    pub fn report(&mut self, patience: Duration) -> String {
        self.ended(patience);
        let (mut output, mut errors) = (String::new(), String::new());
        self.output.read_to_string(&mut output).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let report = output.split_once("REPORT:").map(|(_, rest)| rest.lines().next().unwrap_or_default().to_owned());
        report.unwrap_or_else(|| panic!("no report from a rank:\n{output}\n{errors}"))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tells the test that this rank is connected.
pub fn announce() {
    println!("RANK IS UP");
}

/// Ends a rank's program with what it has to say.
pub fn report(text: &str) {
    println!("REPORT:{text}");
}

/// Repeatable random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
