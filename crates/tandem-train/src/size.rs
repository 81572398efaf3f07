//! Numbers of bytes, as people write and read them.

/// Units with their bytes, the largest first.
const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("B", 1),
];

/// Reads "24GiB", "1.5 GB" or "512MiB"; `None` if it is no such thing, or less than a byte.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, bytes) = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)))?;
    let bytes = number.trim().parse::<f64>().ok()? * bytes as f64;
    (1.0..=(1u64 << 60) as f64).contains(&bytes).then(|| bytes.round() as u64)
}

/// Reads a line `NAME: 1234 kB` of a file below `/proc`, in bytes.
pub fn of_proc_line(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Formats bytes so that [`parse`] returns exactly the same number.
pub fn exact(bytes: u64) -> String {
    let fits = |(_, unit): &&(&str, u64)| bytes >= *unit && bytes.is_multiple_of(*unit);
    let (unit, size) = UNITS.iter().find(fits).unwrap_or(&("B", 1));
    format!("{}{unit}", bytes / size)
}

/// Formats bytes for people: "1.25 GiB", "312.0 MiB", "12 KiB".
pub fn in_words(bytes: u64) -> String {
    let of = |unit: u64| bytes as f64 / unit as f64;
    match bytes {
        0..0x40_0000 => format!("{:.0} KiB", of(1 << 10)),
        0x40_0000..0x1_0000_0000 => format!("{:.1} MiB", of(1 << 20)),
        _ => format!("{:.2} GiB", of(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_unit_and_written_so_that_they_read_back() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("24 GB", 24_000_000_000),
            ("1.5GiB", 3 << 29),
            (" 512MiB ", 512 << 20),
            ("100B", 100),
        ] {
            assert_eq!(parse(text), Some(bytes), "{text}");
            assert_eq!(parse(&exact(bytes)), Some(bytes), "{text}");
        }
        assert_eq!(exact(3 << 29), "1536MiB");
        for text in ["", "24", "GiB", "-1GiB", "0GiB", "24gib", "1e300GiB", "nanGiB"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(in_words(3 << 29), "1536.0 MiB");
        assert_eq!(in_words(80 << 30), "80.00 GiB");
    }
}
