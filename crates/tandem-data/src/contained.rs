//! Decoders of other crates, which panic over some damaged files.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// True while this thread decodes: a panic is then an error, which its caller tells.
    static DECODING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a decoder. Its panic is an error, and prints nothing. The decoder is not to be used after that.
pub(crate) fn contained<T>(decode: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |info| {
            if !DECODING.get() {
                usual(info);
            }
        }));
    });
    let outer = DECODING.replace(true);
    let decoded = catch_unwind(AssertUnwindSafe(decode));
    DECODING.set(outer);
    decoded.map_err(|payload| format!("the decoder fails: {}", message(&*payload)))
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        assert_eq!(contained(|| 3), Ok(3));
        assert_eq!(contained(|| panic!("at {}", 7)), Err::<(), _>("the decoder fails: at 7".to_owned()));
        assert_eq!(contained(|| contained::<()>(|| panic!("in")).is_err()), Ok(true));
        assert!(!DECODING.get());
    }
}
