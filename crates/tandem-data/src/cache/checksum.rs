//! BLAKE3 hash of a file on all cores: all threads hash a portion while the next one is read.
//!
//! Files are read, not mapped. Truncation by another process is then an error instead of a crash,
//! and checked bytes do not count as this process's memory.

use std::io::{self, Read};

/// Bytes of a portion. Two portions are in memory.
const PORTION_BYTES: u64 = 8 << 20;

/// Returns the BLAKE3 hash of the remaining input, computed on the current rayon pool.
pub(crate) fn hash(input: impl Read + Send) -> io::Result<blake3::Hash> {
    with_portions(input, PORTION_BYTES)
}

fn with_portions(mut input: impl Read + Send, portion_bytes: u64) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    let (mut portion, mut next) = (Vec::new(), Vec::new());
    let mut read = |portion: &mut Vec<u8>| -> io::Result<usize> {
        portion.clear();
        input.by_ref().take(portion_bytes).read_to_end(portion)
    };
    read(&mut portion)?;
    while !portion.is_empty() {
        let (_, count) = rayon::join(|| hasher.update_rayon(&portion), || read(&mut next));
        count?;
        std::mem::swap(&mut portion, &mut next);
    }
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_do_not_change_the_hash() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        for length in [0, 1, 1023, 1024, 4096, 4097, 300_000] {
            let expected = blake3::hash(&bytes[..length]);
            for portion in [1000, 4096, 1 << 20] {
                assert_eq!(
                    with_portions(&bytes[..length], portion).unwrap(),
                    expected,
                    "{length} by {portion}"
                );
            }
        }
    }

    #[test]
    fn an_error_on_the_way_is_not_the_end_of_the_file() {
        struct Broken(usize);
        impl Read for Broken {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::UnexpectedEof)?;
                buffer[..16].fill(1);
                Ok(16)
            }
        }
        for reads in 0..6 {
            assert_eq!(with_portions(Broken(reads), 32).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
