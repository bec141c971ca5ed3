//! From stored tensors to weights: number formats in files made by hand, and what a contradiction says.
#![allow(clippy::single_range_in_vec_init)] // selections are lists of ranges, and often of one

mod common;

use std::path::Path;

use common::{f32_bytes, model, refusal, safetensors_of};
use consort_checkpoint::{Checkpoint, CheckpointError};

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn tensors_of_types_that_are_no_format_are_refused() {
    for dtype in ["I16", "F64", "I64", "U8", "F8_E5M2"] {
        let bytes = [0; 64];
        let size = if dtype == "I16" {
            2
        } else if dtype.ends_with("64") {
            8
        } else {
            1
        };
        for parameter in ["weight", "bias"] {
            let name = format!("{Q}.{parameter}");
            let model = model("", &safetensors_of(&[(&name, dtype, &[2, 2], &bytes[..4 * size])]));
            let message = refusal(model.path());
            assert!(message.contains(&format!("model.safetensors: tensor {name}: ")), "{message}");
            assert!(message.contains(&format!("is {dtype}; F32, F16 and BF16 are read without scales")), "{message}");
        }
    }
    // Buffers may have any type.
    let position = safetensors_of(&[("model.position_ids", "I64", &[1], &[0; 8]), ("a", "F32", &[1], &[0; 4])]);
    assert_eq!(Checkpoint::open(model("", &position).path()).unwrap().skipped(), ["model.position_ids"]);
}

#[test]
fn tied_embeddings_follow_the_configuration_and_the_files() {
    let values = f32_bytes(&[1.0; 4]);
    let embedding = ("model.embed_tokens.weight", "F32", &[2usize, 2][..], &values[..]);
    let head = ("lm_head.weight", "F32", &[2usize, 2][..], &values[..]);
    let open = |config: &str, tensors: &[_]| {
        let model = model(config, &safetensors_of(tensors));
        Checkpoint::open(model.path()).map(|checkpoint| {
            (
                checkpoint.tensor("lm_head.weight").is_some(),
                checkpoint.config()["tie_word_embeddings"].as_bool().unwrap(),
            )
        })
    };
    let (tied, untied) = (r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    assert_eq!(open(tied, &[embedding, head]).unwrap(), (false, true));
    assert_eq!(open(tied, &[embedding]).unwrap(), (false, true));
    assert_eq!(open(untied, &[embedding, head]).unwrap(), (true, false));
    assert_eq!(open("", &[embedding]).unwrap(), (false, true));
    assert_eq!(open("", &[embedding, head]).unwrap(), (true, false));
    let misspelled = ("lm_haed.weight", "F32", &[2usize, 2][..], &values[..]);
    let error = open("", &[embedding, misspelled]).unwrap_err().to_string();
    assert!(
        error.contains("tie_word_embeddings: is missing, and so is lm_head.weight, but lm_haed.weight has"),
        "{error}"
    );
    assert_eq!(open(tied, &[embedding, misspelled]).unwrap(), (false, true));
    let error = open(untied, &[embedding]).unwrap_err().to_string();
    assert!(error.contains("tie_word_embeddings: is false, but there is no lm_head.weight"), "{error}");
}

/// Opens a module of these tensors under this quantization block.
fn scheme(quantization: &str, tensors: &[(&str, &str, &[usize], &[u8])]) -> Result<Vec<f32>, String> {
    let named: Vec<(String, &str, &[usize], &[u8])> =
        tensors.iter().map(|&(name, dtype, shape, data)| (format!("{Q}.{name}"), dtype, shape, data)).collect();
    let named: Vec<_> = named.iter().map(|(name, dtype, shape, data)| (name.as_str(), *dtype, *shape, *data)).collect();
    let config =
        if quantization.is_empty() { String::new() } else { format!(r#""quantization_config": {quantization}"#) };
    let model = model(&config, &safetensors_of(&named));
    let read = |checkpoint: Checkpoint| checkpoint.read_f32(&format!("{Q}.weight"));
    Checkpoint::open(model.path()).and_then(read).map_err(|error| error.to_string())
}

const FP8: &str = r#"{"quant_method": "fp8"}"#;
const FP8_BLOCK: &str = r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#;

#[test]
fn fp8_scales_of_blocks_and_tensors() {
    // Ones, each in the block of its scale; the last blocks are ragged.
    let ones = vec![0x38; 192 * 130];
    let half = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
    let scales: [(&str, Vec<u8>); 2] =
        [("F32", f32_bytes(&[1.0, 2.0, 3.0, 4.0])), ("BF16", [1.0, 2.0, 3.0, 4.0].map(half).concat())];
    for (dtype, scale) in scales {
        let tensors: [(&str, &str, &[usize], &[u8]); 2] =
            [("weight", "F8_E4M3", &[192, 130], &ones), ("weight_scale_inv", dtype, &[2, 2], &scale)];
        let values = scheme(FP8_BLOCK, &tensors).unwrap();
        for (at, expected) in [((0, 0), 1.0), ((0, 129), 2.0), ((130, 0), 3.0), ((130, 129), 4.0)] {
            assert_eq!(values[at.0 * 130 + at.1], expected, "{dtype} {at:?}");
        }
    }
    let twos = [0x40; 16];
    for shape in [&[][..], &[1]] {
        let tensors: [(&str, &str, &[usize], &[u8]); 3] = [
            ("weight", "F8_E4M3", &[4, 4], &twos),
            ("weight_scale_inv", "F32", shape, &f32_bytes(&[0.25])),
            ("activation_scale", "F32", &[], &f32_bytes(&[0.5])),
        ];
        assert_eq!(scheme(FP8, &tensors).unwrap(), [0.5; 16]);
    }
}

#[test]
fn nvfp4_global_scales_multiply_or_divide() {
    let (codes, block) = ([0x07; 8], [0x40]);
    let expected: Vec<f32> = [6.0, 0.0].repeat(8);
    let modelopt = r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#;
    let values = scheme(
        modelopt,
        &[
            ("weight", "U8", &[1, 8], &codes),
            ("weight_scale", "F8_E4M3", &[1, 1], &block),
            ("weight_scale_2", "F32", &[], &f32_bytes(&[0.5])),
        ],
    );
    assert_eq!(values.unwrap(), expected);
    let compressed = r#"{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}"#;
    let values = scheme(
        compressed,
        &[
            ("weight_packed", "U8", &[1, 8], &codes),
            ("weight_scale", "F8_E4M3", &[1, 1], &block),
            ("weight_global_scale", "F32", &[1], &f32_bytes(&[2.0])),
        ],
    );
    assert_eq!(values.unwrap(), expected);
}

/// 5120 columns of 4, 6 and 8 bits, declared as a converter of a wrapped model declares them.
#[test]
fn settings_of_one_layer_are_found_under_renamed_prefixes() {
    let quantization = r#""quantization": {"group_size": 64, "bits": 4,
        "model.language_model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 6},
        "lm_head": {"group_size": 64, "bits": 8}, "x": false}"#;
    let group_bytes = vec![0; 80 * 2];
    let open = |module_words: [(&str, usize); 3], x: bool| {
        let words: Vec<Vec<u8>> = module_words.iter().map(|(_, words)| vec![0; words * 4]).collect();
        let names: Vec<[String; 3]> = module_words
            .iter()
            .map(|(module, _)| ["weight", "scales", "biases"].map(|parameter| format!("{module}.{parameter}")))
            .collect();
        let shapes: Vec<[usize; 2]> = module_words.iter().map(|(_, words)| [1, *words]).collect();
        let mut tensors: Vec<(&str, &str, &[usize], &[u8])> = Vec::new();
        for ((names, shape), words) in names.iter().zip(&shapes).zip(&words) {
            tensors.push((&names[0], "U32", shape, words));
            tensors.extend(names[1..].iter().map(|name| (name.as_str(), "F16", &[1usize, 80][..], &group_bytes[..])));
        }
        if x {
            tensors.push(("x.weight", "BF16", &[1, 80], &group_bytes));
        }
        let model = model(quantization, &safetensors_of(&tensors));
        Checkpoint::open(model.path()).map(|checkpoint| {
            let info = |name: &str| checkpoint.tensor(name).map(|info| (info.shape[1], info.format.to_string()));
            ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "x.weight"]
                .map(info)
        })
    };
    let (down, up) = ("model.language_model.layers.0.mlp.down_proj", "model.language_model.layers.0.mlp.up_proj");
    let found = open([(down, 640), (up, 960), ("lm_head", 1280)], true).unwrap();
    let formats = found.map(|found| found.unwrap());
    assert_eq!(formats.each_ref().map(|(columns, _)| *columns), [5120, 5120, 5120, 80]);
    for (format, bits) in formats.iter().zip(["4", "6", "8", "BF16"]) {
        assert!(format.1.contains(bits), "{format:?}");
    }
    // Words of another width are no matrix of these settings, whatever they hold.
    for words in [[(down, 960), (up, 960), ("lm_head", 1280)], [(down, 640), (up, 640), ("lm_head", 1280)]] {
        let error = open(words, false).unwrap_err().to_string();
        assert!(error.contains("tensor model.layers.0.mlp.") && error.contains("bits in groups of 64"), "{error}");
    }
}

#[test]
fn contradictions_name_the_tensor_and_the_scheme() {
    let (codes, one) = (vec![0x38; 32 * 64], f32_bytes(&[1.0]));
    let weight: (&str, &str, &[usize], &[u8]) = ("weight", "F8_E4M3", &[32, 64], &codes);
    let scalar: (&str, &str, &[usize], &[u8]) = ("weight_scale", "F32", &[], &one);
    let four = f32_bytes(&[1.0; 4]);
    let mlx = r#"{"bits": 4, "group_size": 64}"#;
    let compressed = |format: &str| format!(r#"{{"quant_method": "compressed-tensors", "format": "{format}"}}"#);
    let (words, halves) = (vec![0; 4 * 8 * 4], vec![0; 4 * 2]);
    let affine = |scales: &'static [usize]| -> Vec<(&str, &str, &[usize], &[u8])> {
        vec![("weight", "U32", &[4, 8], &words), ("scales", "F16", scales, &halves), ("biases", "F16", scales, &halves)]
    };
    let cases: Vec<(String, Vec<(&str, &str, &[usize], &[u8])>, &str)> = vec![
        (
            FP8.into(),
            vec![weight],
            "is F8_E4M3 and cannot be decoded: FP8 with scales needs weight_scale too, which is missing",
        ),
        (
            String::new(),
            vec![weight, scalar],
            "has weight, weight_scale (FP8 with scales), which no quantization_config declares",
        ),
        (
            mlx.into(),
            vec![weight, scalar],
            "mlx affine of 4 bits in groups of 64: is stored as FP8 with scales (weight, weight_scale)",
        ),
        (FP8.into(), vec![weight, ("weight_scale", "F32", &[2, 2], &four)], "weight_scale has shape [2, 2]"),
        (FP8_BLOCK.into(), vec![weight, ("weight_scale", "F32", &[2, 2], &four)], "not [1, 1]"),
        (FP8.into(), vec![weight, ("weight_scale", "I32", &[], &one)], "weight_scale is I32"),
        (
            r#"{"quant_method": "fp8", "weight_block_size": [64, 64]}"#.into(),
            vec![weight, scalar],
            "blocks of 64 x 64 in F32 are not supported",
        ),
        (compressed("int-quantized"), vec![weight, scalar], "\"int-quantized\" of compressed-tensors is not supported"),
        (compressed("nonsense"), vec![weight, scalar], "\"nonsense\" of compressed-tensors is not supported"),
        (r#"{"quant_method": "bitnet"}"#.into(), vec![], "quant_method: \"bitnet\" is not supported"),
        (r#"{"quant_method": "gptq", "bits": 3}"#.into(), vec![], "GPTQ of 3 bits is not supported"),
        (r#"{"bits": 7, "group_size": 64}"#.into(), vec![], "affine of 7 bits"),
        (r#"{"mode": "mxfp4", "bits": 4, "group_size": 64}"#.into(), vec![], "mxfp4 of 4 bits in groups of 64"),
        (mlx.into(), affine(&[4, 2]), "scales has shape [4, 2], not [4, 1]"),
        (
            r#"{"mode": "mxfp4"}"#.into(),
            affine(&[4, 1]),
            "mxfp4 of 4 bits in groups of 32: biases belong to affine codes",
        ),
        (mlx.into(), affine(&[4, 1])[..2].to_vec(), "no biases beside affine codes"),
        (format!(r#"{{"bits": 4, "group_size": 64, "{Q}": false}}"#), affine(&[4, 1]), "its entry is false"),
        (mlx.into(), vec![("qweight", "I32", &[4, 8], &words)], "has qweight, which no known scheme has"),
    ];
    for (quantization, tensors, expected) in cases {
        // Sizes in the cases above are those of their first shape; data is cut or padded to what each header says.
        let tensors: Vec<_> = tensors.iter().map(|&(name, dtype, shape, data)| (name, dtype, shape, data)).collect();
        let sized: Vec<(&str, &str, &[usize], Vec<u8>)> = tensors
            .iter()
            .map(|&(name, dtype, shape, data)| {
                let bytes = match dtype {
                    "F32" | "U32" | "I32" => 4,
                    "F16" | "BF16" => 2,
                    _ => 1,
                };
                let mut data = data.to_vec();
                data.resize(shape.iter().product::<usize>() * bytes, 0);
                (name, dtype, shape, data)
            })
            .collect();
        let tensors: Vec<_> =
            sized.iter().map(|(name, dtype, shape, data)| (*name, *dtype, *shape, &data[..])).collect();
        let error = scheme(&quantization, &tensors).expect_err(expected);
        assert!(error.contains(expected), "{quantization}: {error}");
        let named = error.contains(Q) || error.contains("quantization_config");
        assert!(named, "names neither tensor nor block: {error}");
    }
}

/// The models that the reference implementation made, in every family and format.
#[test]
fn every_fixture_opens_and_reads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures");
    let mut seen = 0;
    for directory in std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        if !directory.join("config.json").exists() {
            continue;
        }
        let checkpoint = Checkpoint::open(&directory).unwrap();
        assert!(checkpoint.tensor("model.embed_tokens.weight").is_some(), "{}", directory.display());
        for tensor in checkpoint.tensors() {
            let values = checkpoint.read_f32(&tensor.name).unwrap();
            let finite = values.iter().all(|value| value.is_finite());
            assert!(finite, "{}: {} is not finite", directory.display(), tensor.name);
        }
        seen += 1;
    }
    assert!(seen >= 20, "only {seen} fixtures");
}

#[test]
fn selections_are_checked() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemes/mlx-affine4");
    let checkpoint = Checkpoint::open(&fixture).unwrap();
    let name = format!("{Q}.weight");
    let read = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
        checkpoint.read(&[&name], &[rows], Some(&[columns])).map(|_| ())
    };
    assert!(read(0..24, 64..128).is_ok());
    assert!(matches!(read(0..25, 0..64), Err(CheckpointError::OutOfRange { end: 25, limit: 24, .. })));
    assert!(matches!(read(0..1, 0..320), Err(CheckpointError::OutOfRange { end: 320, limit: 256, .. })));
    assert!(matches!(read(0..1, 32..128), Err(CheckpointError::CutBlock { column: 32, block: 64, .. })));
    assert!(matches!(read(0..1, 0..96), Err(CheckpointError::CutBlock { column: 96, block: 64, .. })));
    assert!(matches!(checkpoint.read(&["x"], &[], None), Err(CheckpointError::NoTensor { .. })));
    assert!(matches!(checkpoint.read(&[], &[], None), Err(CheckpointError::NoTensor { .. })));
}
