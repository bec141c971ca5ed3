#![no_main]

#[path = "../drive.rs"]
#[allow(dead_code)]
mod drive;

libfuzzer_sys::fuzz_target!(|data: &[u8]| drive::tokenizer(data));
