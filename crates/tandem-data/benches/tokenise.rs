//! Rows per second from JSONL to the mapped cache, and of `tokenizers` encoding the same texts.
//!
//! Run: `cargo bench -p tandem-data --bench tokenise`. Both use all threads of the rayon pool. The
//! peer receives ready texts (no file, JSON, template or cache) and encodes a preference's prompt,
//! and the prompt with either response.
//!
//! `-- PAIRS.jsonl FOLDER` prints the seconds that the peer alone takes for these plain-text pairs
//! with the folder's tokenizer, for comparison with whole runs by `bench/data`.

use std::io::BufRead;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tandem_data::chat_template::RenderOptions;
use tandem_data::prepare::prepare;
use tandem_data::progress::Silent;
use tandem_data::record::RowKind;
use tandem_data::row::RowOptions;
use tandem_data::source::Sources;
use tandem_data::tokenizer::Tokenizer;

const ROWS: usize = 6000;
const ROUNDS: usize = 3;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    if let [pairs, folder] = &arguments[..] {
        println!("{:.3}", peer_alone(Path::new(pairs), Path::new(folder)).as_secs_f64());
        return;
    }
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (file, conversational) in [("pref_plain.jsonl", false), ("pref_conv.jsonl", true)] {
        // A fresh tokenizer for each, so that neither finds the other's words in its cache.
        let load = || Tokenizer::from_folder(data.join("tokenizer")).expect("the tokenizer");
        let rows = rows(&data.join(file));
        let path = folder.path().join(file);
        let lines: Vec<_> = rows.iter().map(Value::to_string).collect();
        std::fs::write(&path, lines.join("\n")).expect("the data file");
        let texts = texts(&rows, conversational, &load());

        let (mut ours, mut peer, mut mapped) = (Duration::MAX, Duration::MAX, Duration::MAX);
        let sources = Sources::from(path);
        let options = RowOptions::new(RowKind::Preference);
        for round in 0..ROUNDS {
            let cache = folder.path().join(format!("{file}-{round}"));
            let tokenizer = load();
            let start = Instant::now();
            let built = prepare(&sources, &tokenizer, &options, &cache, &Silent).expect("tokenised");
            ours = ours.min(start.elapsed());
            assert_eq!((built.num_rows(), built.was_built()), (ROWS, true));

            let start = Instant::now();
            let found = prepare(&sources, &tokenizer, &options, &cache, &Silent).expect("mapped");
            mapped = mapped.min(start.elapsed());
            assert!(!found.was_built());

            let peers_own = inner(&data.join("tokenizer"));
            let input = texts.clone();
            let start = Instant::now();
            let encoded = peers_own.encode_batch_fast(input, !conversational).expect("encoded");
            peer = peer.min(start.elapsed());
            assert_eq!(encoded.len(), 3 * ROWS);
        }
        let rate = |time: Duration| ROWS as f64 / time.as_secs_f64();
        println!(
            "{file}: file to cache {:.0} rows/s, encode_batch_fast alone {:.0} rows/s, ratio {:.2}; mapped again in {:.1} ms",
            rate(ours),
            rate(peer),
            rate(ours) / rate(peer),
            1e3 * mapped.as_secs_f64()
        );
    }
}

/// Loads the peer's own file.
fn inner(folder: &Path) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).expect("the peer's tokenizer")
}

/// Returns the time in the peer's calls, each with a portion of rows.
fn peer_alone(pairs: &Path, folder: &Path) -> Duration {
    const PORTION: usize = 4096;
    let ours = Tokenizer::from_folder(folder).expect("the tokenizer");
    let eos = ours.eos_token().expect("an end-of-sequence token").to_string();
    let tokenizer = inner(folder);
    let file = std::fs::File::open(pairs).expect("the pairs");
    let mut lines = std::io::BufReader::new(file).lines();
    let mut spent = Duration::ZERO;
    loop {
        let rows: Vec<Value> = lines
            .by_ref()
            .take(PORTION)
            .map(|line| serde_json::from_str(&line.expect("a line")).expect("JSON"))
            .collect();
        if rows.is_empty() {
            return spent;
        }
        let of = |row: &Value| {
            let [prompt, chosen, rejected] =
                ["prompt", "chosen", "rejected"].map(|key| row[key].as_str().expect("a text").to_string());
            [format!("{prompt}{chosen}{eos}"), format!("{prompt}{rejected}{eos}"), prompt]
        };
        let texts: Vec<String> = rows.iter().flat_map(of).collect();
        let count = texts.len();
        let start = Instant::now();
        let encoded = tokenizer.encode_batch_fast(texts, true).expect("encoded");
        spent += start.elapsed();
        assert_eq!(encoded.len(), count);
    }
}

/// Repeats the rows of a test file, with a number in each response.
fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the test file");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let numbered = |answer: &mut Value, i: usize| match answer {
        Value::String(text) => text.push_str(&format!(" {i}")),
        answer => {
            let content = answer[0]["content"].as_str().expect("an answer");
            answer[0]["content"] = format!("{content} {i}").into();
        }
    };
    rows.iter()
        .cycle()
        .take(ROWS)
        .cloned()
        .enumerate()
        .map(|(i, mut row)| {
            numbered(&mut row["chosen"], i);
            numbered(&mut row["rejected"], i + 1);
            row
        })
        .collect()
}

/// Returns the texts to encode: each row's prompt, alone and with either response.
fn texts(rows: &[Value], conversational: bool, tokenizer: &Tokenizer) -> Vec<String> {
    let render = |parts: &[&Value], add_generation_prompt: bool| -> String {
        if !conversational {
            return parts.iter().map(|part| part.as_str().expect("a text")).collect();
        }
        let lists = parts.iter().flat_map(|part| part.as_array().expect("messages"));
        let messages: Vec<_> = lists.map(|m| m.as_object().expect("a message").clone()).collect();
        let options = RenderOptions { add_generation_prompt, ..RenderOptions::default() };
        let template = tokenizer.chat_template().expect("a template");
        template.render(&messages, options).expect("rendered")
    };
    rows.iter()
        .flat_map(|row| {
            let prompt = &row["prompt"];
            [
                render(&[prompt], true),
                render(&[prompt, &row["chosen"]], false),
                render(&[prompt, &row["rejected"]], false),
            ]
        })
        .collect()
}
