//! Pseudo-random numbers as functions of their purpose.

/// A number that belongs to these: the same wherever and whenever it is asked for.
pub(crate) fn draw(of: &[u64]) -> u64 {
    let mut hash = blake3::Hasher::new();
    for number in of {
        hash.update(&number.to_le_bytes());
    }
    let first = hash.finalize().as_bytes()[..8].try_into().expect("eight bytes");
    u64::from_le_bytes(first)
}
