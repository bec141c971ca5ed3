//! The rules of a safetensors header: whatever breaks one is refused with the name of the tensor, whatever keeps them loads.

mod common;

use common::{f32_bytes, model, refusal, safetensors, safetensors_of};
use consort_checkpoint::Checkpoint;

fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

fn refused(entries: &[String], data_bytes: usize) -> String {
    let file = safetensors(&format!("{{{}}}", entries.join(",")), &vec![0; data_bytes]);
    refusal(model("", &file).path())
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    let huge = refusal(model("", &[0xff; 8]).path());
    assert!(huge.contains("header of 18446744073709551615 bytes"), "{huge}");
    let mut long = 4096u64.to_le_bytes().to_vec();
    long.extend_from_slice(b"{}");
    let long = refusal(model("", &long).path());
    assert!(long.contains("4104 bytes expected, 10 found"), "{long}");
    let short = refusal(model("", b"{}").path());
    assert!(short.contains("truncated"), "{short}");
    // A published example: a shape of 1000 x 1000 over four bytes.
    let hex = "3e000000000000007b2274223a7b226474797065223a22463332222c227368617065223a5b313030302c313030305d2c2264617461\
               5f6f666673657473223a5b302c345d7d7d00000000";
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let lying = refusal(model("", &bytes).path());
    assert!(lying.contains("tensor t") && lying.contains("4000000 bytes"), "{lying}");
}

#[test]
fn wrong_entries_are_refused_by_name() {
    let tensor = |shape, offsets| vec![entry("t", "F32", shape, offsets)];
    let cases = [
        (tensor("[1]", "[4,0]"), "run backwards"),
        (tensor("[1]", "[-1,3]"), "tensor \"t\""),
        (tensor("[1]", "[0,4,8]"), "tensor \"t\""),
        (tensor("[8589934592,8589934592]", "[0,4]"), "overflows"),
        (tensor("[0,8589934592,8589934592]", "[0,0]"), "overflows"),
        (tensor("[2]", "[0,8]"), "truncated"),
        (vec![entry("t", "F99", "[1]", "[9223372036854775808,9223372036854775812]")], "truncated"),
        (vec![entry("t.weight", "F99", "[1]", "[0,4]")], "tensor t.weight: unknown dtype \"F99\""),
        (vec![entry("s", "F32", "[1]", "[0,4]"), entry("t", "F32", "[1]", "[0,4]")], "overlaps"),
        (vec![entry("t", "F32", "[0]", "[4,4]"), entry("t", "F32", "[1]", "[0,4]")], "\"t\" occurs twice"),
    ];
    for (entries, expected) in cases {
        let message = refused(&entries, 4);
        assert!(message.contains(expected) && message.contains('t'), "{entries:?}: {message}");
    }
    let twice = refused(&[r#""t":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}"#.to_string()], 4);
    assert!(twice.contains("tensor \"t\": duplicate field `dtype`"), "{twice}");
    let long = refused(&[entry(&format!("{}.weight", "t".repeat(1 << 16)), "F99", "[1]", "[0,4]")], 4);
    assert!(long.contains("unknown dtype") && long.len() < 1000, "{} bytes", long.len());
    let hole = refused(&[entry("s", "F32", "[1]", "[0,4]"), entry("t", "F32", "[1]", "[8,12]")], 12);
    assert!(hole.contains("tensor t: leaves a hole"), "{hole}");
    let tail = refused(&[entry("t", "F32", "[1]", "[0,4]")], 12);
    assert!(tail.contains("accounts for"), "{tail}");
}

#[test]
fn empty_tensors_and_any_order_load() {
    let entries = [
        entry("model.norm.weight", "F32", "[2]", "[4,12]"),
        entry("empty", "F32", "[0,5]", "[4,4]"),
        entry("first", "F32", "[1]", "[0,4]"),
        r#""__metadata__":{"format":"pt"}"#.to_string(),
    ];
    let data = f32_bytes(&[1.0, 2.0, 3.0]);
    let directory = model("", &safetensors(&format!("{{{}}}", entries.join(",")), &data));
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.read_f32("model.norm.weight").unwrap(), [2.0, 3.0]);
    assert_eq!(checkpoint.read_f32("first").unwrap(), [1.0]);
    assert_eq!(checkpoint.read_f32("empty").unwrap(), [0.0; 0]);
    assert_eq!(checkpoint.tensor("empty").unwrap().shape, [0, 5]);
}

#[test]
fn a_file_that_is_cut_or_replaced_is_recognised() {
    let whole = safetensors_of(&[("t", "F32", &[4], &f32_bytes(&[1.0; 4]))]);
    for cut in 0..whole.len() {
        let message = refusal(model("", &whole[..cut]).path());
        assert!(message.contains("model.safetensors: truncated"), "cut at {cut}: {message}");
    }
    let cut = refusal(model("", &whole[..whole.len() - 1]).path());
    assert!(cut.contains(&format!("{} bytes expected, {} found", whole.len(), whole.len() - 1)), "{cut}");
    let page = refusal(model("", b"<!DOCTYPE html><html><body>Sign in</body></html>").path());
    assert!(page.contains("model.safetensors: a web page"), "{page}");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n";
    let pointer = refusal(model("", pointer).path());
    assert!(pointer.contains("Git LFS pointer to a file of 4976698672 bytes"), "{pointer}");
}
