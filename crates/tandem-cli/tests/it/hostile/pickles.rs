//! Files of `torch.save` that would take memory, the stack or a program's place.

use std::fs;

use super::GENERATE;
use crate::workshop::Workshop;

const FILE: &str = "model/pytorch_model.bin";

/// A zip of stored members, as `torch.save` writes it.
fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    let record = |member: &(&str, &[u8])| {
        let length = (member.1.len() as u32).to_le_bytes();
        let crc = crc32fast::hash(member.1).to_le_bytes();
        let name = (member.0.len() as u16).to_le_bytes();
        [&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &crc, &length, &length, &name, &[0, 0]].concat()
    };
    for member in members {
        directory.extend(
            [&b"PK\x01\x02\x14\0"[..], &record(member), &[0; 10], &(file.len() as u32).to_le_bytes()]
                .concat(),
        );
        directory.extend(member.0.as_bytes());
        file.extend([&b"PK\x03\x04"[..], &record(member), member.0.as_bytes(), member.1].concat());
    }
    let count = (members.len() as u16).to_le_bytes();
    let [length, start] = [directory.len() as u32, file.len() as u32].map(u32::to_le_bytes);
    file.extend([&directory[..], b"PK\x05\x06\0\0\0\0", &count, &count, &length, &start, &[0, 0]].concat());
    file
}

fn saved(pickle: &[u8]) -> Vec<u8> {
    zip(&[("archive/data.pkl", pickle), ("archive/version", b"3\n"), ("archive/data/0", &[0; 4])])
}

fn text(text: &[u8]) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text].concat()
}

fn integer(value: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &value.to_le_bytes()].concat()
}

/// A state dict with one tensor.
fn tensor(shape: &[i64], stride: &[i64], offset: i64, key: &[u8], storage: &[u8]) -> Vec<u8> {
    let sizes = |sizes: &[i64]| {
        [b"(", &sizes.iter().flat_map(|&size| integer(size)).collect::<Vec<_>>()[..], b"t"].concat()
    };
    [
        b"\x80\x02}(",
        &text(b"model.embed_tokens.weight")[..],
        b"ctorch._utils\n_rebuild_tensor_v2\n((",
        &text(b"storage"),
        b"ctorch\n",
        storage,
        b"\n",
        &text(key),
        &text(b"cpu"),
        &integer(1),
        b"tQ",
        &integer(offset),
        &sizes(shape),
        &sizes(stride),
        b"\x89}tRu.",
    ]
    .concat()
}

#[test]
fn pickles_are_bounded() {
    let shop = Workshop::new();
    fs::remove_file(shop.path("model/model.safetensors")).unwrap();
    let repeat = |before: &[u8], code: &[u8], times: usize| [before, &code.repeat(times), b"."].concat();
    // A dictionary of many entries, which each entry of another one is.
    let entries = |value: &[u8]| {
        (0..40_000)
            .flat_map(|i| [text(format!("{i:06}").as_bytes()), value.to_vec()].concat())
            .collect::<Vec<u8>>()
    };
    let squared = [b"\x80\x02}q\0(", &entries(b"N")[..], b"u0}(", &entries(b"h\0"), b"u."].concat();
    let long_key =
        [b"\x80\x02", &text(&[b'a'; 1 << 20])[..], b"q\x000}(", &b"h\0N".repeat(1 << 20), b"u."].concat();
    let float = b"FloatStorage";
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("a million tuples", repeat(b"\x80\x02)", b"\x85", 1_000_000), "tuples within one another"),
        ("many tuples", repeat(b"\x80\x02)", b"\x85", 8_000_000), "tuples within one another"),
        ("many dictionaries", repeat(b"\x80\x02", b"}", 8_000_000), "holds no state dict"),
        ("many lists", repeat(b"\x80\x02", b"]", 8_000_000), "no dictionary"),
        ("many marks", repeat(b"\x80\x02", b"(", 8_000_000), "stack is empty"),
        ("many values", repeat(b"\x80\x02", b"N", 8_000_000), "no dictionary"),
        ("too long", repeat(b"\x80\x02", b"N", 9_000_000), "at most 8 MiB"),
        ("a far memo", b"\x80\x02Nr\xff\xff\xff\x7f.".to_vec(), "memo far beyond"),
        ("a memo that is not there", b"\x80\x02h\x05.".to_vec(), "memo that it never wrote"),
        ("itself", b"\x80\x02}q\0X\x01\0\0\0ah\0s.".to_vec(), "no state dict"),
        ("squared", squared, "repeats dictionaries"),
        ("a long key", long_key, "repeats dictionaries"),
        ("a program", b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.".to_vec(), "asks for os.system"),
        ("a program by name", b"\x80\x04\x8c\x05posix\x8c\x06system\x93.".to_vec(), "asks for posix.system"),
        ("escapes", b"\x80\x02co\x1b[2Js\nsys\x07tem\n.".to_vec(), "asks for o"),
        ("a call of nothing", b"\x80\x02NNR.".to_vec(), "not a known global"),
        ("nothing", Vec::new(), "cut short"),
        ("an end", b".".to_vec(), "stack is empty"),
        ("a long integer", b"\x80\x02\x8b\xff\xff\xff\x7f.".to_vec(), "pickle"),
        ("a long text", b"\x80\x02X\xff\xff\xff\xff.".to_vec(), "cut short"),
        ("a longer text", [b"\x80\x04\x8d", &[0xff; 8][..], b"."].concat(), "pickle"),
        ("another opcode", b"\x80\x02I1\n.".to_vec(), "opcode"),
        ("shape", tensor(&[-1], &[1], 0, b"0", float), "model.embed_tokens.weight"),
        ("a large shape", tensor(&[1 << 62, 4], &[4, 1], 0, b"0", float), "model.embed_tokens.weight"),
        ("an offset", tensor(&[1], &[1], 1 << 62, b"0", float), "model.embed_tokens.weight"),
        ("dimensions", tensor(&[1; 10_000], &[1; 10_000], 0, b"0", float), "pickle"),
        ("another storage", tensor(&[1], &[1], 0, b"../../x", float), "which the zip lacks"),
        ("a long name", tensor(&[1], &[1], 0, &[b'k'; 100_000], float), "pickle"),
        ("another type", tensor(&[1], &[1], 0, b"0", b"EvilStorage"), "tensors do not fit"),
    ];
    for (case, pickle, says) in cases {
        let says = if case == "shape" { "pickle" } else { says };
        shop.refuses_with(case, FILE, &saved(&pickle), &GENERATE, &["pytorch_model.bin", says]);
    }
}

#[test]
fn zips_that_lie() {
    let shop = Workshop::new();
    fs::remove_file(shop.path("model/model.safetensors")).unwrap();
    let good = saved(b"\x80\x02}.");
    shop.refuses_with(
        "empty dictionary",
        FILE,
        &good,
        &GENERATE,
        &["pytorch_model.bin", "holds no state dict"],
    );
    let at = |signature: &[u8]| good.windows(4).rposition(|four| four == signature).unwrap();
    let (end, central) = (at(b"PK\x05\x06"), at(b"PK\x01\x02"));
    for (case, place, bytes) in [
        ("many members", end + 10, &[0xff; 2][..]),
        ("a directory elsewhere", end + 16, &[0xff; 4]),
        ("sizes", central + 20, &[0xff; 8]),
        ("a long name", central + 28, &[0xff; 2]),
        ("a file elsewhere", central + 42, &[0xff, 0xff, 0xff, 0x7f]),
        ("compressed", central + 10, &[8]),
    ] {
        let mut bad = good.clone();
        bad[place..place + bytes.len()].copy_from_slice(bytes);
        shop.refuses_with(case, FILE, &bad, &GENERATE, &["pytorch_model.bin"]);
    }
    for length in [0, 1, 4, 30, good.len() / 2, good.len() - 1] {
        shop.refuses_with("cut", FILE, &good[..length], &GENERATE, &["pytorch_model.bin"]);
    }
    let other = zip(&[("archive/data.txt", b"N.")]);
    shop.refuses_with("no pickle", FILE, &other, &GENERATE, &["holds no data.pkl"]);
}
