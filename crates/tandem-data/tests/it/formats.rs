//! The same rows in every format, and files that are not what they seem.
//!
//! `tests/data/formats/make.py` wrote the files with pyarrow and datasets.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, Decimal128Array, Float32Array, Float64Array, Int32Array, RecordBatch, RunArray, StringArray,
};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::extension::Json;
use arrow_schema::{DataType, Field, Schema};

use crate::fixture::{data_path, tokenizer_with};
use tandem_data::columns::Columns;
use tandem_data::prepare::prepare;
use tandem_data::progress::Silent;
use tandem_data::prompts;
use tandem_data::record::RowKind;
use tandem_data::report::Reason;
use tandem_data::row::RowOptions;
use tandem_data::source::Sources;
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;

struct Bench {
    folder: tempfile::TempDir,
    tokenizer: Tokenizer,
    options: RowOptions,
}

impl Bench {
    fn new() -> Self {
        let (folder, tokenizer) = tokenizer_with(false, None);
        Self { folder, tokenizer, options: RowOptions::new(RowKind::Preference) }
    }

    fn try_prepare(&self, path: impl Into<PathBuf>) -> Result<TokenCache, String> {
        let cache = self.folder.path().join("cache");
        let sources = Sources::from(path.into());
        prepare(&sources, &self.tokenizer, &self.options, &cache, &Silent)
            .map_err(|e| match std::error::Error::source(&e) {
                Some(cause) => format!("{e}: {cause}"),
                None => e.to_string(),
            })
            .map_err(|e| e.replace(&format!("{}/", self.folder.path().display()), ""))
    }

    fn prepare(&self, path: impl Into<PathBuf>) -> TokenCache {
        self.try_prepare(path).unwrap_or_else(|e| panic!("{e}"))
    }

    fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn refusal(&self, name: &str, content: &[u8]) -> String {
        self.try_prepare(self.write(name, content)).err().unwrap_or_else(|| panic!("{name} was read"))
    }
}

fn format_path(name: &str) -> PathBuf {
    data_path("formats").join(name)
}

fn decompressed(name: &str) -> Vec<u8> {
    let file = File::open(format_path(name)).unwrap();
    let mut content = Vec::new();
    match Path::new(name).extension().unwrap().to_str() {
        Some("gz") => flate2::read::GzDecoder::new(file).read_to_end(&mut content).unwrap(),
        _ => zstd::stream::read::Decoder::new(file).unwrap().read_to_end(&mut content).unwrap(),
    };
    content
}

fn assert_same_rows(expected: &TokenCache, found: &TokenCache, num_rows: usize) {
    let file = found.files()[0].display();
    assert_eq!((expected.num_rows(), found.num_rows()), (num_rows, num_rows), "{file}");
    for i in 0..num_rows {
        assert_eq!(expected.pair(i), found.pair(i), "row {i} of {file}");
    }
    let [a, b] = [expected, found].map(|cache| std::fs::read(cache.path()).unwrap());
    assert!(a == b, "the cache of {file} is another");
}

#[test]
fn the_same_rows_in_every_format_give_the_same_tokens() {
    let bench = Bench::new();
    let lines = decompressed("rows.jsonl.zst");
    let expected = bench.prepare(bench.write("rows.jsonl", &lines));
    assert_eq!(expected.report().count(Reason::WithoutPrompt), 20);
    for name in ["rows.jsonl.zst", "rows.jsonl.gz", "rows.parquet", "rows.feather", "rows.csv.gz"] {
        let found = bench.prepare(format_path(name));
        assert!(found.was_built(), "{name}");
        assert_same_rows(&expected, &found, 1000);
        // Cells of the table hold line ends.
        assert_eq!(found.origin(999).line, if name.contains("csv") { 1543 } else { 1000 });
    }
    // Our own writers of compressed files and of tables.
    let mut table = csv::WriterBuilder::new().delimiter(b'\t').from_writer(Vec::new());
    table.write_record(["rejected", "prompt", "chosen"]).unwrap();
    for line in lines.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let row: serde_json::Value = serde_json::from_slice(line).unwrap();
        table.write_record(["rejected", "prompt", "chosen"].map(|key| row[key].as_str().unwrap())).unwrap();
    }
    let table = table.into_inner().unwrap();
    assert_same_rows(&expected, &bench.prepare(bench.write("rows.tsv", &table)), 1000);
    let table = zstd::encode_all(&table[..], 1).unwrap();
    assert_same_rows(&expected, &bench.prepare(bench.write("rows.tsv.zst", &table)), 1000);
    let parquet = std::fs::read(format_path("rows.parquet")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&parquet).unwrap();
    let gzip = bench.write("rows.parquet.gz", &gzip.finish().unwrap());
    assert_same_rows(&expected, &bench.prepare(gzip), 1000);
    let feather = std::fs::read(format_path("rows.feather")).unwrap();
    let feather = bench.write("rows.arrow.zst", &zstd::encode_all(&feather[..], 1).unwrap());
    assert_same_rows(&expected, &bench.prepare(feather), 1000);
}

#[test]
fn conversations_in_nested_columns_give_the_same_tokens() {
    let bench = Bench::new();
    let expected = bench.prepare(format_path("chat.jsonl"));
    let names = ["none", "snappy", "gzip", "lz4", "large"].map(|codec| format!("chat_{codec}.parquet"));
    for name in names.iter().map(String::as_str).chain(["chat_large.feather", "chat_stream.arrow"]) {
        assert_same_rows(&expected, &bench.prepare(format_path(name)), 40);
    }
    let rows = prompts::read(&format_path("chat_snappy.parquet")).unwrap();
    let source = rows.iter().map(|row| row.row()["source"].as_str().unwrap()).take(4).collect::<Vec<_>>();
    assert_eq!(source, ["a", "b", "c", "a"]);
    assert_eq!(rows[3].row()["score"], 1.0);
    let error = bench.try_prepare(format_path("chat_brotli.parquet")).unwrap_err();
    assert!(error.ends_with("write it with the compression snappy, zstd, gzip or lz4"), "{error}");
}

#[test]
fn a_saved_data_set_and_a_pattern_stand_for_their_files() {
    let bench = Bench::new();
    let lines = decompressed("rows.jsonl.zst");
    let lines: Vec<_> = lines.split_inclusive(|b| *b == b'\n').take(60).collect();
    let expected = bench.prepare(bench.write("part.jsonl", &lines.concat()));
    let saved = bench.prepare(format_path("saved"));
    assert_same_rows(&expected, &saved, 60);
    assert_eq!((saved.files().len(), saved.origin(30).line), (2, 1));
    bench.write("shard-1.jsonl", &lines[20..].concat());
    bench.write("shard-0.jsonl", &lines[..20].concat());
    assert_same_rows(&expected, &bench.prepare(bench.folder.path().join("shard-*.jsonl")), 60);

    let error = bench.try_prepare(bench.folder.path().join("nothing-*.jsonl")).unwrap_err();
    assert_eq!(error, "nothing-*.jsonl: no file matches this pattern");
    let error = bench.try_prepare(bench.folder.path()).unwrap_err();
    assert!(
        error.contains("a folder that save_to_disk of datasets did not write (no state.json)"),
        "{error}"
    );
    bench.write("dataset_dict.json", br#"{"splits": ["train", "test"]}"#);
    let error = bench.try_prepare(bench.folder.path()).unwrap_err();
    assert!(error.ends_with("a data set of several splits: give one, train or test"), "{error}");
}

#[test]
fn files_that_are_not_what_they_seem_are_refused_with_the_remedy() {
    let bench = Bench::new();
    let parquet = std::fs::read(format_path("rows.parquet")).unwrap();
    let feather = std::fs::read(format_path("rows.feather")).unwrap();
    let stream = std::fs::read(format_path("chat_stream.arrow")).unwrap();
    let zst = std::fs::read(format_path("rows.jsonl.zst")).unwrap();
    let gz = std::fs::read(format_path("rows.jsonl.gz")).unwrap();
    let half = |content: &[u8]| content[..content.len() / 2].to_vec();
    for (name, content, expected) in [
        ("a.csv", parquet.clone(), "a.csv: CSV by its name, Parquet by its content: rename it"),
        ("a.jsonl", parquet.clone(), "a.jsonl: JSON by its name, Parquet by its content: rename it"),
        ("a.parquet", feather.clone(), "a.parquet: Parquet by its name, Arrow by its content: rename it"),
        ("a.parquet", half(&parquet), "a.parquet: cannot read the Parquet file ("),
        ("a.parquet", Vec::new(), "a.parquet: not Parquet: it is empty; download or write it again"),
        ("a.parquet", b"<html>".to_vec(), "a.parquet: not Parquet: it begins with \"<html>\""),
        ("a.feather", half(&feather), "a.feather: cannot read the Arrow file ("),
        ("a.arrow", half(&stream), "a.arrow: cannot read the Arrow file ("),
        ("a.jsonl", zst.clone(), "a.jsonl: compressed with zstd: add .zst to its name"),
        ("a.jsonl.gz", zst.clone(), "a.jsonl.gz: not compressed as its name says"),
        ("a.jsonl.zst", half(&zst), "reading a.jsonl.zst: the compressed data are cut off or damaged ("),
        ("a.jsonl.gz", half(&gz), "reading a.jsonl.gz: the compressed data are cut off or damaged ("),
        ("a.data", b"hello".to_vec(), "a.data: the format is not known by its name: expected .jsonl, .json"),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\n".to_vec(),
            "a.parquet: a pointer of Git LFS",
        ),
        ("a.csv", Vec::new(), "no rows in a.csv"),
        ("a.csv", b"prompt,chosen,rejected\n".to_vec(), "no rows in a.csv"),
        (
            "a.csv",
            b"prompt,chosen,chosen\n1,2,3\n".to_vec(),
            "a.csv: the header line has two columns `chosen`",
        ),
        (
            "a.csv",
            b"prompt,chosen,rejected\n1,2,3\n1,2\n".to_vec(),
            "a.csv:3: expected 3 cells, as in the header line, found 2",
        ),
        ("a.csv", b"prompt,chosen,rejected\n1,2,\xff\n".to_vec(), "a.csv:2: `rejected` should be UTF-8"),
    ] {
        let error = bench.refusal(name, &content);
        assert!(error.starts_with(expected), "expected {expected}\nfound {error}");
    }
}

#[test]
fn a_column_of_the_wrong_type_is_named_with_its_row() {
    let bench = Bench::new();
    let names = [("chosen".to_string(), "made".to_string())].into();
    let options = RowOptions {
        columns: Columns { names, ignored: vec!["chosen".into()], ..Columns::default() },
        ..bench.options.clone()
    };
    let error = Bench { options, ..bench }.try_prepare(format_path("chat_large.parquet")).unwrap_err();
    assert!(
        error.contains(
            "chat_large.parquet:1: `chosen` should be a string or a list of messages, found a value of Arrow's type \
             Timestamp(µs); write the column as text or numbers"
        ),
        "{error}"
    );
}

#[test]
fn the_number_of_rows_and_the_prompt_length_are_limited() {
    let mut bench = Bench::new();
    let all = bench.prepare(format_path("rows.parquet"));
    bench.options.max_rows = Some(130);
    let first = bench.prepare(format_path("rows.parquet"));
    assert_eq!(first.num_rows(), 130);
    for i in 0..130 {
        assert_eq!(first.pair(i), all.pair(i));
    }
    bench.options.max_rows = None;
    bench.options.max_prompt_length = Some(4);
    let short = bench.prepare(format_path("rows.parquet"));
    let expected: Vec<_> = (0..all.num_rows()).filter(|&i| all.pair(i).prompt.len() <= 4).collect();
    assert!(!expected.is_empty() && expected.len() < 1000);
    assert_eq!(short.report().count(Reason::LongPrompt), 1000 - expected.len() as u64);
    for (i, &row) in expected.iter().enumerate() {
        assert_eq!(short.pair(i), all.pair(row));
    }
}

#[test]
fn lines_of_tables_are_counted_with_either_line_end() {
    let bench = Bench::new();
    for end in ["\n", "\r\n"] {
        let lines = ["prompt,chosen,rejected", "1,2,3", "1,\"two\nlines\",3", "4,5,6"];
        let table = lines.map(|line| format!("{line}{end}")).concat();
        let cache = bench.prepare(bench.write("a.csv", table.as_bytes()));
        assert_eq!([0, 1, 2].map(|row| cache.origin(row).line), [2, 3, 5], "{end:?}");
        let error = bench.refusal("a.csv", format!("{table}7,8{end}").as_bytes());
        assert!(error.starts_with("a.csv:6: expected 3 cells"), "{end:?}: {error}");
    }
}

#[test]
fn margins_in_tables_are_numbers() {
    let mut bench = Bench::new();
    bench.options.kind = RowKind::Reward;
    let table = "prompt,chosen,rejected,margin\n1,2,3,0.5\n4,5,6,\n";
    let cache = bench.prepare(bench.write("a.csv", table.as_bytes()));
    assert_eq!([cache.margin(0), cache.margin(1)], [0.5, 0.0]);
    let error = bench.refusal("b.csv", b"prompt,chosen,rejected,margin\n1,2,3,much\n");
    assert!(error.starts_with("b.csv:2: `margin` should be a number, found a string"), "{error}");
}

/// Every byte of the metadata and every length before a compressed buffer may be wrong.
#[test]
fn damaged_arrow_files_are_errors() {
    let bench = Bench::new();
    for name in ["rows.feather", "chat_stream.arrow", "chat_large.feather"] {
        let bytes = std::fs::read(format_path(name)).unwrap();
        let mut refused = 0;
        for at in (0..bytes.len()).step_by(bytes.len() / 80 + 1) {
            for value in [0x7f, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                refused += usize::from(bench.try_prepare(bench.write("damaged.arrow", &damaged)).is_err());
            }
        }
        assert!(refused > 5, "{name}: {refused}");
    }
}

#[test]
fn a_file_that_is_no_file_is_refused() {
    let bench = Bench::new();
    let error = bench.try_prepare("/dev/null").unwrap_err();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn a_link_to_a_folder_above_repeats_no_rows() {
    let bench = Bench::new();
    let row = b"{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n";
    let file = bench.write("rows.jsonl", row);
    let folder = file.parent().unwrap();
    std::os::unix::fs::symlink(folder, folder.join("above")).unwrap();
    assert_eq!(bench.prepare(folder.join("**/*.jsonl")).num_rows(), 1);
}

#[test]
fn a_row_without_an_end_is_refused() {
    let bench = Bench::new();
    let endless = vec![b'{'; 257 << 20];
    let error = bench.refusal("bomb.jsonl.zst", &zstd::encode_all(&endless[..], 1).unwrap());
    assert!(error.contains("longer than 16 MiB"), "{error}");
}

#[test]
fn a_row_of_a_table_may_be_as_long_as_one_of_text() {
    let mut bench = Bench::new();
    let long: ArrayRef = Arc::new(StringArray::from(vec!["a".to_owned(), "a".repeat(16 << 20)]));
    let stream = arrow_stream(vec![("about", long)]);
    let error = bench.refusal("a.arrow", &stream);
    assert_eq!(error, "a.arrow: row 2: it is longer than 16 MiB as JSON");
    bench.options.columns.ignored = vec!["about".into()];
    assert_eq!(bench.prepare(bench.write("a.arrow", &stream)).num_rows(), 2);
}

#[test]
fn a_quote_that_is_never_closed_is_an_error() {
    let bench = Bench::new();
    let table = "prompt,chosen,rejected\n1,\"two\n\"\"lines\"\"\",3\n4,5\" tall,6\n";
    assert_eq!(bench.prepare(bench.write("a.csv", table.as_bytes())).num_rows(), 2);
    let rest = "8,9\n10,11,12\n";
    for (row, line) in [("7,\"", 5), ("\"7,", 5), ("7,8\r\n,\"\"\"", 6)] {
        let row = row.replace("7,8\r\n", "a,b,c\r\n");
        let error = bench.refusal("b.csv", format!("{table}{row}{rest}").as_bytes());
        let expected = format!("b.csv:{line}: the quote that opens a cell on this line is never closed");
        assert!(error.starts_with(&expected), "{row:?}: {error}");
    }
    let error = bench.refusal("c.csv", b"\xef\xbb\xbf\"prompt,chosen,rejected\n1,2,3\n");
    assert!(error.starts_with("c.csv:1: the quote"), "{error}");
}

/// An Arrow stream of two rows of preferences with these columns more.
fn arrow_stream(more: Vec<(&str, ArrayRef)>) -> Vec<u8> {
    let texts = |texts: [&str; 2]| Arc::new(StringArray::from(texts.to_vec())) as ArrayRef;
    let mut columns =
        vec![("prompt", texts(["a", "b"])), ("chosen", texts(["c", "d"])), ("rejected", texts(["e", "f"]))];
    columns.extend(more);
    let batch = RecordBatch::try_from_iter_with_nullable(
        columns.into_iter().map(|(name, column)| (name, column, true)),
    );
    stream_of(&batch.unwrap())
}

fn stream_of(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn texts_of_json_are_what_they_hold() {
    let rows = |name: &str| {
        let rows = prompts::read(&format_path(name)).unwrap();
        rows.iter().map(|row| row.row().clone()).collect::<Vec<_>>()
    };
    let expected = rows("calls.jsonl");
    assert_eq!(expected[1]["tools"][0]["parameters"]["properties"]["exact"]["default"], false);
    for name in ["calls.parquet", "calls.arrow"] {
        assert_eq!(rows(name), expected, "{name}");
    }
    let bench = Bench::new();
    let texts = StringArray::from(vec![Some("{\"a\": 1}"), Some("{\"a\": ")]);
    let json = Field::new("about", DataType::Utf8, true).with_extension_type(Json::default());
    let words: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let names = ["prompt", "chosen", "rejected"];
    let fields = names.map(|name| Field::new(name, DataType::Utf8, true)).into_iter().chain([json]);
    let columns = [words.clone(), words.clone(), words, Arc::new(texts)];
    let batch =
        RecordBatch::try_new(Arc::new(Schema::new(fields.collect::<Vec<_>>())), columns.to_vec()).unwrap();
    let error = bench.refusal("a.arrow", &stream_of(&batch));
    let expected = "a.arrow:2: `about` should be JSON, found \"{\\\"a\\\": \" (EOF while parsing a value at line 1 column 6), \
                    in a column whose type is JSON; write null there, or leave the column out with data.ignore_columns";
    assert_eq!(error, expected);
}

#[test]
fn numbers_that_are_not_finite_are_errors() {
    let bench = Bench::new();
    let margins = |second: Option<f64>| -> ArrayRef { Arc::new(Float64Array::from(vec![Some(0.5), second])) };
    bench.prepare(bench.write("null.arrow", &arrow_stream(vec![("margin", margins(None))])));
    for (number, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")] {
        let error = bench.refusal("a.arrow", &arrow_stream(vec![("margin", margins(Some(number)))]));
        let expected =
            format!("a.arrow:2: `margin` should be finite, or null where there is no number, found {shown};");
        assert!(error.starts_with(&expected), "{error}");
    }
    let halves: ArrayRef = Arc::new(Float32Array::from(vec![f32::NAN, 1.0]));
    let mut bench = bench;
    let stream = arrow_stream(vec![("score", halves)]);
    assert!(bench.refusal("b.arrow", &stream).starts_with("b.arrow:1: `score` should be finite"));
    bench.options.columns.ignored = vec!["score".into()];
    bench.prepare(bench.write("b.arrow", &stream));
}

#[test]
fn values_that_rows_do_not_have_are_named_by_their_type() {
    let mut bench = Bench::new();
    bench.options = RowOptions::new(RowKind::Reward);
    let decimals = Decimal128Array::from(vec![5, 6]).with_precision_and_scale(10, 2).unwrap();
    let stream = arrow_stream(vec![("margin", Arc::new(decimals) as ArrayRef)]);
    let error = bench.refusal("a.arrow", &stream);
    let expected = "a.arrow:1: `margin` should be a number, found a value of Arrow's type Decimal128(10, 2); write the column \
                    as float64";
    assert_eq!(error, expected);
    let ends = Int32Array::from(vec![1, 2]);
    let runs: RunArray<Int32Type> = RunArray::try_new(&ends, &StringArray::from(vec!["x", "y"])).unwrap();
    let error = bench.refusal("b.arrow", &arrow_stream(vec![("margin", Arc::new(runs) as ArrayRef)]));
    assert!(error.ends_with("; write the column as plain values, without run-end encoding"), "{error}");
}
