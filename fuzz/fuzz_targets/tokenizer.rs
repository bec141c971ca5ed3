#![no_main]

#[path = "../drive.rs"]
#[allow(dead_code)]
mod drive;

/// A panic in a library that becomes an error is no finding.
fn pass_over_guarded_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !consort_checkpoint::tokenizer::is_guarded() {
            report(panic);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: pass_over_guarded_panics(), |data: &[u8]| drive::tokenizer(data));
