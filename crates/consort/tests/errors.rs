//! Mistakes of a user: each is one clear line on standard error, nothing on standard output, and a non-zero exit code.

mod support;

use std::path::Path;

use support::{consort, expected, fixture, ids, refused, run};

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A copy of a checkpoint with one key of its configuration changed.
fn changed(key: &str, value: serde_json::Value) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama").join(file), copy.path().join(file)).unwrap();
    }
    let config = copy.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
    json[key] = value;
    std::fs::write(config, json.to_string()).unwrap();
    copy
}

#[test]
fn files_that_are_not_there_or_not_a_model() {
    refused(&["generate", "-m", "/nowhere/model.gguf", "-p", "x"], "/nowhere/model.gguf");
    refused(&["inspect", "/nowhere/model.gguf"], "/nowhere/model.gguf");
    refused(&["logits", "-m", "./nowhere", "--tokens", "1"], "./nowhere");
    let empty = tempfile::tempdir().unwrap();
    refused(&["inspect", path(empty.path())], "config.json");
    let text = empty.path().join("model.gguf");
    std::fs::write(&text, "not a model").unwrap();
    refused(&["inspect", path(&text)], "model.gguf");
}

#[test]
fn an_unknown_architecture_is_refused_with_the_known_ones() {
    let copy = changed("model_type", "perceptron".into());
    for ranks in ["1", "2"] {
        let arguments = ["generate", "-m", path(copy.path()), "--tokens", "1", "-n", ranks];
        refused(&arguments, "architecture \"perceptron\" is not supported; supported are ");
    }
}

/// Quantizers to GPTQ gave every layer a bias, of zeros where the model has none.
#[test]
fn a_bias_of_gptq_that_the_model_does_not_have_must_be_zero() {
    let original = fixture("llama-gptq");
    let file = std::fs::read(original.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(original.join("config.json"), copy.path().join("config.json")).unwrap();
    let with_bias = |value: u16| {
        let mut header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        let mut data = file[8 + length..].to_vec();
        let start = data.len();
        data.extend_from_slice(&value.to_le_bytes().repeat(128));
        header["model.layers.1.mlp.down_proj.bias"] =
            serde_json::json!({"dtype": "F16", "shape": [128], "data_offsets": [start, data.len()]});
        let text = header.to_string();
        let whole = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat();
        std::fs::write(copy.path().join("model.safetensors"), whole).unwrap();
    };
    let logits = |model: &Path, plan: &str| run(&["logits", "-m", path(model), "--tokens", "1,2,3", "--plan", plan]);
    for plan in ["tensor:1", "tensor:2"] {
        with_bias(0);
        let (found, wanted) = (logits(copy.path(), plan), logits(&original, plan));
        assert_eq!((found.code, found.stdout), (Some(0), wanted.stdout));
        with_bias(0x3c00);
        let found = logits(copy.path(), plan);
        let expected = "\"model.layers.1.mlp.down_proj.bias\" is in the checkpoint, but is not zero";
        assert!(found.code != Some(0) && found.stderr.contains(expected), "{found:?}");
    }
}

#[test]
fn a_damaged_configuration_names_the_key() {
    let copy = changed("num_hidden_layers", "three".into());
    refused(&["inspect", path(copy.path())], "num_hidden_layers");
}

/// Also where the prompt is given as ids: what comes out would not be the text that the model says.
#[test]
fn a_damaged_tokenizer_names_its_part() {
    let copy = changed("use_cache", true.into());
    let tokenizer = copy.path().join("tokenizer.json");
    let of = |normalizer: &str, pre_tokenizer: &str| {
        format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": {normalizer}, "pre_tokenizer": {pre_tokenizer},
            "post_processor": null, "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
            "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {{"a": 0}}, "merges": []}}}}"#
        )
    };
    let growing =
        r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "LONG"}"#.replace("LONG", &"a".repeat(1000));
    let cases = [
        (
            of("null", r#"{"type": "FixedLength", "length": 0}"#),
            "pre-tokenizer 1 (FixedLength): the tokenizers library fails",
        ),
        (
            of(
                &format!(r#"{{"type": "Sequence", "normalizers": [{growing}, {growing}, {growing}, {growing}]}}"#),
                "null",
            ),
            "normalizer 2 (Replace): makes more than",
        ),
        (of(r#"{"type": "Prepend", "prepend": ""}"#, "null"), "normalizer 1 (Prepend)"),
        ("{".to_owned(), "EOF while parsing"),
    ];
    for (json, part) in cases {
        std::fs::write(&tokenizer, json).unwrap();
        for flags in [&["--tokens", "0"][..], &["-p", "a"]] {
            let arguments = [&["generate", "-m", path(copy.path()), "--max-tokens", "1"], flags].concat();
            refused(&arguments, &format!("{}: ", path(&tokenizer)));
            refused(&arguments, part);
        }
    }
    std::fs::remove_file(tokenizer).unwrap();
    assert_eq!(run(&["generate", "-m", path(copy.path()), "--tokens", "0", "--max-tokens", "1"]).code, Some(0));
}

#[test]
fn a_configuration_of_another_model_names_the_directory_and_the_key() {
    for (key, value, expected) in [
        ("num_hidden_layers", 2.into(), "config.json: key \"num_hidden_layers\" = 2"),
        ("rms_norm_eps", serde_json::json!({"__float__": "NaN"}), "config.json: key \"rms_norm_eps\" = "),
        ("vocab_size", 200.into(), "weight \"model.embed_tokens.weight\" has shape"),
        ("eos_token_id", "68".into(), "config.json: eos_token_id: \"68\" is no token id"),
        ("quantization_config", serde_json::json!({"quant_method": "fp8"}), "but no tensor is quantized"),
    ] {
        let copy = changed(key, value);
        let finished = run(&["generate", "-m", path(copy.path()), "--tokens", "1"]);
        assert!(finished.stderr.contains(&format!("error: {}", path(copy.path()))), "{finished:?}");
        refused(&["generate", "-m", path(copy.path()), "--tokens", "1"], expected);
    }
}

#[test]
fn plans_that_do_not_fit() {
    let llama = fixture("llama");
    let generate = ["generate", "-m", path(&llama), "--tokens", "1"];
    for (flags, expected) in [
        (&["--plan", "pipeline:4"][..], "4 stages for 3 layers"),
        (&["-n", "4", "--plan", "pipeline:4"], "4 stages for 3 layers"),
        (&["--plan", "pipeline:2/2"], "its stages hold 4 layers, the model has 3"),
        (&["-n", "3", "--plan", "tensor:2"], "-n 3 contradicts --plan tensor:2, which needs 2 ranks"),
        (&["-n", "1", "--plan", "pipeline:2,tensor:2"], "which needs 4 ranks"),
        (&["--plan", "rows:2"], "\"rows:2\" is not known"),
        (&["--plan", "tensor:0"], "\"0\" is not a whole number from 1 to"),
        (&["-n", "0"], "0 is not in 1..=1024"),
        (&["--hang-timeout", "0"], "expected seconds from 0.1"),
    ] {
        refused(&[&generate, flags].concat(), expected);
    }
}

#[test]
fn prompts_that_cannot_be_continued() {
    let llama = fixture("llama");
    let long = vec!["1"; 600].join(",");
    for ranks in ["1", "2"] {
        for (flags, expected) in [
            (&["-p", ""][..], "the prompt is empty"),
            (&["--tokens", &long], "the prompt has 600 tokens, the context holds 512"),
            (&["--tokens", "1,256"], "token 256 is outside the model's vocabulary of 256"),
            (&["--tokens", "1", "--context", "513"], "513 tokens is more than the model's 512"),
        ] {
            for command in ["generate", "logits"] {
                refused(&[&[command, "-m", path(&llama), "-n", ranks], flags].concat(), expected);
            }
        }
    }
    // An answer needs room, logits need none.
    let full = ["-m", path(&llama), "--tokens", "1,2,3", "--context", "3"];
    refused(
        &[&["generate"], &full[..]].concat(),
        "the prompt has 3 tokens, the context holds 3: no room for an answer",
    );
    assert_eq!(run(&[&["logits"], &full[..]].concat()).stdout.lines().count(), 3);
    refused(&["generate", "-m", path(&llama)], "--prompt");
    refused(&["generate", "-m", path(&llama), "--tokens", "1", "-p", "x"], "cannot be used with");
    refused(&["generate", "-m", path(&llama), "--tokens", "1,x"], "invalid value 'x'");
    refused(&["generate", "-m", path(&llama), "-p", "text, but the model has no tokenizer"], "tokenizer");
}

#[test]
fn sampling_parameters_out_of_range() {
    let llama = fixture("llama");
    for (flag, value) in [("--temperature", "-1"), ("--temperature", "NaN"), ("--top-p", "1.5"), ("--min-p", "-0.1")] {
        let name = flag.trim_start_matches('-').replace('-', "_");
        refused(&["generate", "-m", path(&llama), "--tokens", "1", flag, value], &name);
    }
}

#[test]
fn a_result_that_could_not_be_written_is_refused_before_the_work() {
    let llama = fixture("llama");
    refused(&["generate", "-m", path(&llama), "--tokens", "1", "--json", "/nowhere/out.json"], "/nowhere");
}

#[test]
fn a_port_in_use_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let llama = fixture("llama");
    let flags = ["generate", "-m", path(&llama), "--tokens", "1", "-n", "2", "--port", &port];
    refused(&flags, &format!("cannot listen on 127.0.0.1:{port}"));
    let elsewhere = |address| [&flags[..5], &["-n", "2", "--bind", address]].concat();
    refused(&elsewhere("0.0.0.0"), "ranks meet at 0.0.0.0:");
    refused(&elsewhere("192.0.2.1"), "--bind must be an address of this machine");
}

#[test]
fn hostfiles_that_cannot_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let hostfile = directory.path().join("hosts.json");
    let llama = fixture("llama");
    let launch = |hosts: &str, flags: &[&str], expected: &str| {
        std::fs::write(&hostfile, hosts).unwrap();
        let arguments =
            ["launch", "--hostfile", path(&hostfile), "--", "generate", "-m", path(&llama), "--tokens", "1"];
        refused(&[&arguments, flags].concat(), expected);
    };
    launch("[", &[], "hosts.json: JSON: ");
    launch(r#"[{"ssh": "-v"}]"#, &[], r#"host 0 (-v), field "ssh""#);
    launch(r#"[{"ssh": "localhost", "slots": "2"}]"#, &[], r#"host 0 (localhost), field "slots""#);
    launch(r#"[{"ssh": "localhost"}]"#, &["-n", "2"], "2 ranks were asked for, but the hosts have 1 slots");
    launch(r#"[{"ssh": "localhost"}, {"ssh": "m2"}]"#, &[], r#"add "ips""#);
    refused(
        &["launch", "--hostfile", "/nowhere/hosts.json", "--", "generate", "-m", "x", "-p", "y"],
        "/nowhere/hosts.json",
    );
    refused(&["launch", "--hostfile", path(&hostfile), "--", "inspect", "x"], "only generate, chat, logits and bench");
}

#[test]
fn what_the_system_says_is_said_once_beside_the_path() {
    let place = tempfile::tempdir().unwrap();
    let (llama, absent) = (fixture("llama"), place.path().join("absent"));
    let (llama, below) = (path(&llama), absent.join("x"));
    let file = place.path().join("file");
    std::fs::write(&file, "").unwrap();
    let in_a_file = file.join("x");
    let generate = ["generate", "-m", llama, "--tokens", "1"];
    let cases: [(&[&str], &Path); 4] = [
        (&["launch", "--hostfile", path(&absent), "--", "generate", "-m", llama, "--tokens", "1"], &absent),
        (&["convert", "-m", llama, "--to", "bf16", "--output", path(&below)], &absent),
        (&[&generate[..], &["--cache-repacked", path(&in_a_file)]].concat(), &in_a_file),
        (&[&generate[..], &["-n", "2", "--key", path(&absent)]].concat(), &absent),
    ];
    for (arguments, place) in cases {
        let said = run(arguments).stderr;
        refused(arguments, path(place));
        assert_eq!((said.matches("os error").count(), said.matches(path(place)).count()), (1, 1), "{said}");
    }
}

#[test]
fn environment_of_a_rank_that_makes_no_sense() {
    let llama = fixture("llama");
    let mut command = consort(&["generate", "-m", path(&llama), "--tokens", "1"]);
    let output = command.env("CONSORT_RANK", "0").output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.starts_with("error: environment variable CONSORT_SIZE: missing"), "{message}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let llama = fixture("llama");
    let prompt = ids(&expected("llama")["prompt"]);
    let mut command = consort(&["generate", "-m", path(&llama), "--tokens", &prompt, "--ignore-eos", "-n", "2"]);
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A device that takes nothing stands for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_named() {
    let place = tempfile::tempdir().unwrap();
    let (llama, key) = (fixture("llama"), place.path().join("key"));
    let (llama, key) = (path(&llama), path(&key));
    let cases: [&[&str]; 11] = [
        &["--help"],
        &["version"],
        &["inspect", llama],
        &["inspect", llama, "--json"],
        &["key", "new", key],
        &["doctor"],
        &["netbench", "--max-bytes", "4KiB", "--repetitions", "5", "--only", "barrier"],
        &["generate", "-m", llama, "--tokens", "1", "--max-tokens", "2"],
        &["generate", "-m", llama, "--tokens", "1", "--max-tokens", "2", "-n", "2", "--json"],
        &["logits", "-m", llama, "--tokens", "1"],
        &["bench", "-m", llama, "--prompt-tokens", "4", "--generation-tokens", "2", "--repetitions", "1"],
    ];
    for arguments in cases {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = consort(arguments).stdout(full).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        let last = message.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(
            last.starts_with("error: ") && last.contains("standard output: No space left"),
            "{arguments:?}: {message}"
        );
        assert_eq!(message.matches("No space left").count(), 1, "{arguments:?}: {message}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["--version"], &["version"], &["bench", "--help"]] {
        let finished = run(arguments);
        assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(!finished.stdout.is_empty());
    }
    // Also of the command that is launched.
    let hosts = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&hosts, r#"[{"ssh": "localhost"}]"#).unwrap();
    let finished = run(&["launch", "--hostfile", path(hosts.path()), "--", "generate", "--help"]);
    assert!(finished.code == Some(0) && finished.stdout.contains("--max-tokens"), "{finished:?}");
}

/// What cannot be computed with shows at the end, whatever the reason.
#[test]
fn logits_that_are_no_numbers_end_the_run() {
    let copy = changed("use_cache", true.into());
    let weights = copy.path().join("model.safetensors");
    let mut file = std::fs::read(&weights).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let start = 8 + length + header["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    file[start..start + 2].copy_from_slice(&[0xC0, 0x7F]); // NaN in BF16
    std::fs::write(&weights, file).unwrap();
    for command in ["logits", "generate"] {
        let finished = run(&[command, "-m", path(copy.path()), "--tokens", "1,2"]);
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
        let last = finished.stderr.lines().last().unwrap();
        assert!(last.starts_with("error: the model produced logits that are not numbers at position "), "{last}");
    }
}

/// The counts of a configuration are compared with the files before anything is made in their number.
#[test]
fn every_command_refuses_the_configuration_of_another_model() {
    for (key, value, expected) in [
        (
            "num_attention_heads",
            3u64 << 28,
            "config.json: key \"num_attention_heads\" = 805306368: expected a head_dim",
        ),
        ("num_hidden_layers", 1 << 16, "config.json: key \"num_hidden_layers\" = 65536: expected no more than 3"),
        (
            "intermediate_size",
            95,
            "\"model.layers.0.mlp.gate_proj.weight\" has shape [96, 72]; the config says [95, 72]",
        ),
        ("vocab_size", 1 << 40, "\"vocab_size\" = 1099511627776: expected a whole number from 1 to 2147483647"),
    ] {
        let copy = changed(key, value.into());
        let model = path(copy.path());
        let output = copy.path().join("converted");
        refused(&["logits", "-m", model, "--tokens", "1"], expected);
        refused(&["inspect", model], expected);
        refused(&["inspect", model, "--plan", "tensor:2"], expected);
        refused(&["convert", "-m", model, "--to", "bf16", "--output", path(&output)], expected);
        assert!(!output.exists());
    }
}
