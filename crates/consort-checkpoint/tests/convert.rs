//! Conversions of the reference's checkpoints: what comes out is read again and compared with the source, value by value,
//! within what the format's own rounding allows.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use consort_checkpoint::Checkpoint;
use consort_checkpoint::convert::{ConvertError, Options, Report, SHARD_BYTES, Target, convert};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name)
}

fn options(target: Target) -> Options {
    Options { target, keep: Vec::new(), shard_bytes: SHARD_BYTES, threads: 2 }
}

/// A converted model, opened, and its source.
struct Converted {
    source: Checkpoint,
    output: Checkpoint,
    report: Report,
    parent: TempDir,
}

fn converted(name: &str, options: &Options) -> Converted {
    let source = Checkpoint::open(&fixture(name)).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("converted");
    let report = convert(&source, options, &path, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let output = Checkpoint::open(&path).unwrap();
    Converted { source, output, report, parent }
}

fn refusal(name: &str, options: &Options, output: &Path) -> ConvertError {
    convert(&Checkpoint::open(&fixture(name)).unwrap(), options, output, &mut |_, _| ControlFlow::Continue(()))
        .unwrap_err()
}

/// The largest error that a format may make in each value of a block, by how it rounds.
///
/// E2M1 has a half step of a quarter of the value, E4M3 of a sixteenth, down to their smallest normal number, 1 and 2⁻⁶.
fn bounds(target: Target, block: &[f32]) -> Vec<f32> {
    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let range = block.iter().copied().fold(f32::MIN, f32::max) - block.iter().copied().fold(f32::MAX, f32::min);
    let small_float = |half_step: f32, smallest: f32| block.iter().map(|x| half_step * x.abs().max(smallest)).collect();
    match target {
        // The source is BF16.
        Target::Bf16 => vec![0.0; block.len()],
        // The scale is the least power of two that reaches the largest value.
        Target::MxFp4 => small_float(1.0 / 4.0, 2.0 * largest / 6.0),
        Target::MxFp8 => small_float(1.0 / 16.0, 2.0 * largest / 448.0 / 64.0),
        Target::Fp8 => small_float(1.0 / 16.0, largest / 448.0 / 64.0),
        // The scale itself is rounded, by a sixteenth or by half of the smallest E4M3 number, 2⁻⁹: the largest value then
        // saturates.
        Target::NvFp4 => {
            let half_smallest = 0.5f32.powi(10);
            let rounded: Vec<f32> = small_float(1.0 / 4.0, largest / 6.0 * (17.0 / 16.0) + half_smallest);
            rounded.into_iter().map(|bound| bound.max(largest / 16.0 + 6.0 * half_smallest)).collect()
        }
        // Half a step; a step more at the far end, since zero is met exactly; scale and bias are rounded to BF16.
        Target::Affine4 => vec![1.6 * range / 15.0 + largest / 128.0; block.len()],
        Target::Affine8 => vec![1.6 * range / 255.0 + largest / 128.0; block.len()],
    }
}

fn block_of(target: Target) -> usize {
    match target {
        Target::Bf16 => 1,
        Target::NvFp4 => 16,
        Target::MxFp4 | Target::MxFp8 => 32,
        Target::Affine4 | Target::Affine8 => 64,
        // A tile is the whole of these matrices.
        Target::Fp8 => usize::MAX,
    }
}

fn assert_close(target: Target, source: &[f32], output: &[f32], name: &str) {
    assert_eq!(source.len(), output.len(), "{name}");
    for (block, stored) in source.chunks(block_of(target)).zip(output.chunks(block_of(target))) {
        for ((&x, &y), bound) in block.iter().zip(stored).zip(bounds(target, block)) {
            let error = (x - y).abs();
            // The bound itself is computed in f32.
            let bound = bound * 1.0001;
            assert!(error <= bound, "{target}: {name}: {x} became {y}, an error of {error} over {bound}");
        }
    }
}

#[test]
fn every_format_keeps_the_values_within_its_rounding() {
    for target in Target::all() {
        let Converted { source, output, report, parent: _parent } = converted("llama-llama3-bias", &options(target));
        assert_eq!(output.tensors().len(), source.tensors().len(), "{target}");
        for info in source.tensors() {
            let stored = output.tensor(&info.name).unwrap();
            assert_eq!(stored.shape, info.shape);
            let entry = report.tensors.iter().find(|tensor| tensor.name == info.name).unwrap();
            assert_eq!(entry.bytes, stored.bytes, "{target}: {}", info.name);
            let quantized = info.shape.len() == 2 && entry.kept.is_none() && target != Target::Bf16;
            assert_eq!(entry.to != "BF16", quantized, "{target}: {}", info.name);
            let (values, decoded) = (source.read_f32(&info.name).unwrap(), output.read_f32(&info.name).unwrap());
            assert_close(if quantized { target } else { Target::Bf16 }, &values, &decoded, &info.name);
            let (difference, size) = values.iter().zip(&decoded).fold((0.0, 0.0), |(difference, size), (&x, &y)| {
                (difference + f64::from(x - y).powi(2), size + f64::from(x).powi(2))
            });
            let rms = if difference == 0.0 { 0.0 } else { (difference / size).sqrt() };
            assert!((entry.relative_rms_error - rms).abs() < 1e-6, "{target}: {}: {rms}", info.name);
        }
        let matrices = report.tensors.iter().filter(|tensor| tensor.to != "BF16").count();
        let expected = match target {
            Target::Bf16 => 0,
            // transformers keeps the embedding and the output head.
            Target::Fp8 => 4 * 7,
            _ => 4 * 7 + 2,
        };
        assert_eq!(matrices, expected, "{target}");
    }
}

#[test]
fn experts_are_stacked_for_mlx_and_apart_elsewhere() {
    for (target, stacked) in
        [(Target::NvFp4, true), (Target::Affine4, true), (Target::Bf16, false), (Target::Fp8, false)]
    {
        let Converted { source, output, report, parent: _parent } = converted("qwen3_moe", &options(target));
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            let stack = format!("model.layers.2.mlp.experts.{projection}.weight");
            for expert in 0..6 {
                let single = format!("model.layers.2.mlp.experts.{expert}.{projection}.weight");
                let values = source.read_f32(&single).unwrap();
                let decoded = if stacked {
                    let stack = output.read_f32(&stack).unwrap();
                    stack[expert * values.len()..][..values.len()].to_vec()
                } else {
                    output.read_f32(&single).unwrap()
                };
                // 16 columns are no affine group.
                let plain = target == Target::Affine4 && projection == "down_proj";
                assert_close(if plain { Target::Bf16 } else { target }, &values, &decoded, &single);
            }
            assert_eq!(output.tensor(&stack).is_some(), stacked, "{target}");
        }
        let router = report.tensors.iter().find(|tensor| tensor.name == "model.layers.2.mlp.gate.weight").unwrap();
        assert_eq!(router.to, "BF16", "{target}");
    }
}

#[test]
fn rotary_rows_of_a_gguf_file_are_paired_by_halves() {
    let Converted { source, output, parent: _parent, .. } = converted("llama-gguf", &options(Target::Bf16));
    let count = |key: &str| source.config()[key].as_u64().unwrap() as usize;
    let width = count("head_dim");
    for (name, heads) in [("q_proj", count("num_attention_heads")), ("k_proj", count("num_key_value_heads"))] {
        let name = format!("model.layers.1.self_attn.{name}.weight");
        let (before, after) = (source.read_f32(&name).unwrap(), output.read_f32(&name).unwrap());
        let cols = before.len() / (heads * width);
        for head in 0..heads {
            for pair in 0..width / 2 {
                for member in 0..2 {
                    let (from, to) = (head * width + 2 * pair + member, head * width + pair + member * width / 2);
                    let rows = (&before[from * cols..][..cols], &after[to * cols..][..cols]);
                    for (&x, &y) in rows.0.iter().zip(rows.1) {
                        assert!((x - y).abs() <= x.abs() / 256.0, "{name}: row {from}: {x} became {y}");
                    }
                }
            }
        }
    }
    let config = output.config().as_object().unwrap();
    assert!(config.keys().all(|key| !key.starts_with("consort_")), "{config:?}");
    assert_eq!(config["architectures"][0], "LlamaForCausalLM");
}

#[test]
fn weights_can_be_kept_and_unfit_ones_are() {
    let keep = vec!["embed".to_string(), "layers.2.mlp".into(), "absent".into()];
    let Converted { output, report, parent: _parent, .. } =
        converted("llama-llama3-bias", &Options { keep, ..options(Target::Affine8) });
    let plain = |name: &str| output.tensor(name).unwrap().format.to_string() == "BF16";
    assert!(plain("model.embed_tokens.weight") && plain("model.layers.2.mlp.up_proj.weight"));
    assert!(!plain("lm_head.weight") && !plain("model.layers.1.mlp.up_proj.weight"));
    assert_eq!(output.config()["quantization"]["model.layers.2.mlp.up_proj"], false);
    assert!(report.notes.iter().any(|note| note.contains("--keep absent")), "{:?}", report.notes);

    // Its 72 columns are no multiple of 64; the 96 of one projection aren't either.
    let Converted { report, .. } = converted("llama", &options(Target::Affine4));
    assert!(report.tensors.iter().all(|tensor| tensor.to == "BF16"));
    assert!(report.notes.iter().any(|note| note.contains("72 columns are no multiple of 64")), "{:?}", report.notes);
}

#[test]
fn a_long_model_becomes_several_files_with_an_index() {
    let whole = converted("qwen3", &options(Target::MxFp8));
    let Converted { output, report, parent, .. } =
        converted("qwen3", &Options { shard_bytes: 20_000, ..options(Target::MxFp8) });
    assert!(report.files > 2, "{}", report.files);
    let directory = parent.path().join("converted");
    let first = format!("model-00001-of-{:05}.safetensors", report.files);
    assert!(directory.join(first).is_file() && directory.join("model.safetensors.index.json").is_file());
    for info in whole.output.tensors() {
        assert_eq!(whole.output.read_f32(&info.name).unwrap(), output.read_f32(&info.name).unwrap(), "{}", info.name);
    }
}

#[test]
fn refusals_leave_nothing_behind() {
    let parent = tempfile::tempdir().unwrap();
    let there = parent.path().join("there");
    std::fs::create_dir(&there).unwrap();
    let error = refusal("llama", &options(Target::Bf16), &there);
    assert!(matches!(error, ConvertError::Exists { .. }) && error.to_string().contains("there"), "{error}");

    let error = refusal("gpt_oss", &options(Target::Affine4), &parent.path().join("new"));
    assert!(error.to_string().contains("\"gpt_oss\" cannot be converted to affine4 yet; llama, "), "{error}");

    let error = refusal("llama", &options(Target::Bf16), &parent.path().join("absent/new"));
    assert!(matches!(error, ConvertError::Write { .. }), "{error}");
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);

    let stop = &mut |_, _| ControlFlow::Break(());
    let source = Checkpoint::open(&fixture("llama")).unwrap();
    let error = convert(&source, &options(Target::Bf16), &parent.path().join("new"), stop).unwrap_err();
    assert!(matches!(error, ConvertError::Interrupted), "{error}");
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);

    let error = "int3".parse::<Target>().unwrap_err();
    assert_eq!(error, "formats are bf16, fp8, nvfp4, mxfp4, mxfp8, affine4, affine8");
}

/// A llama of one matrix of these values, as F32 and BF16.
fn model_of(values: &[f32], cols: usize) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {}, "hidden_size": {cols}, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 1, "tie_word_embeddings": true}}"#,
        values.len() / cols
    );
    std::fs::write(directory.path().join("config.json"), config).unwrap();
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = format!(
        r#"{{"model.embed_tokens.weight":{{"dtype":"F32","shape":[{},{cols}],"data_offsets":[0,{}]}}}}"#,
        values.len() / cols,
        data.len()
    );
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(directory.path().join("model.safetensors"), file).unwrap();
    directory
}

#[test]
fn what_is_not_finite_is_kept_or_refused_by_its_place() {
    let (rows, cols) = (256, 128);
    let clean: Vec<f32> = (0..rows * cols).map(|at| (at % 17) as f32 - 8.0).collect();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = clean.clone();
        values[200 * cols + 77] = value;
        let source = model_of(&values, cols);
        let source = Checkpoint::open(source.path()).unwrap();
        for target in Target::all() {
            let parent = tempfile::tempdir().unwrap();
            let path = parent.path().join("converted");
            let convert_with = |keep: &[&str]| {
                let keep = keep.iter().map(|part| part.to_string()).collect();
                convert(&source, &Options { keep, ..options(target) }, &path, &mut |_, _| ControlFlow::Continue(()))
            };
            // FP8 leaves the embedding in BF16 anyway.
            let is_plain = matches!(target, Target::Bf16 | Target::Fp8);
            if !is_plain {
                let error = convert_with(&[]).unwrap_err().to_string();
                let expected = format!("tensor model.embed_tokens.weight: the value at [200, 77] is {value}, which ");
                assert!(error.starts_with(&expected) && error.contains("--keep"), "{target}: {error}");
                assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "{target}");
            }
            convert_with(&["embed"]).unwrap();
            let stored = Checkpoint::open(&path).unwrap().read_f32("model.embed_tokens.weight").unwrap();
            assert!(stored.iter().zip(&values).all(|(x, y)| x == y || x.is_nan() && y.is_nan()), "{target}");
        }
    }
}

#[test]
fn fp8_tiles_refuse_what_is_not_finite() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for value in [f32::NAN, f32::INFINITY] {
        let directory = model_of(&vec![0.0; 128 * 128], 128);
        let path = directory.path().join("model.safetensors");
        let file = std::fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(&file[8..200]).into_owned();
        let header = &text[..=text.find("}}").unwrap() + 1];
        let mut data = file[8 + header.len()..].to_vec();
        data[4 * (5 * 128 + 3)..][..4].copy_from_slice(&value.to_le_bytes());
        let header = header.replace("model.embed_tokens.weight", name);
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        std::fs::write(&path, file).unwrap();
        let source = Checkpoint::open(directory.path()).unwrap();
        let output = directory.path().join("converted");
        let error = convert(&source, &options(Target::Fp8), &output, &mut |_, _| ControlFlow::Continue(()));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(&format!("tensor {name}: the value at [5, 3] is {value}, which ")), "{error}");
    }
}

#[test]
fn links_in_place_of_the_output_are_refused() {
    let (parent, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let link = |name: &str, target: &Path| {
        let path = parent.path().join(name);
        std::os::unix::fs::symlink(target, &path).unwrap();
        path
    };
    let places = [
        link("directory", elsewhere.path()),
        link("nothing", &elsewhere.path().join("nothing")),
        // A slash at the end would look through a link.
        link("slash", &elsewhere.path().join("slash")).join(""),
    ];
    let file = parent.path().join("file");
    std::fs::write(&file, "").unwrap();
    for output in places.iter().chain([&file]) {
        let error = refusal("llama", &options(Target::Bf16), output);
        assert!(matches!(error, ConvertError::Exists { .. }), "{output:?}: {error}");
    }
    let error = refusal("llama", &options(Target::Bf16), Path::new("..")).to_string();
    assert!(error.contains("..: not the name of a new directory"), "{error}");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 4);
}
