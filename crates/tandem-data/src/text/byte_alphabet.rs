//! GPT-2's alphabet of bytes, in which byte-level tokenizers write their tokens.

/// Decodes a token of GPT-2's byte alphabet, in which printable bytes stand for themselves and the
/// others are shifted to U+0100 and up. `None` if the token is not written in it.
pub(crate) fn bytes_of(token: &str) -> Option<Vec<u8>> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    token
        .chars()
        .map(|c| {
            let code = c as u32;
            if printable(code) {
                return u8::try_from(code).ok();
            }
            let index = code.checked_sub(0x100)? as usize;
            (0..=0xffu32).filter(|&b| !printable(b)).nth(index).and_then(|b| u8::try_from(b).ok())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2s_alphabet_is_read_back() {
        assert_eq!(bytes_of("ĠcafÃ©Ċ").unwrap(), " café\n".as_bytes());
        assert_eq!(bytes_of("ĀġŃ").unwrap(), [0x00, 0x7f, 0xad]);
        assert_eq!(bytes_of("日"), None);
    }
}
