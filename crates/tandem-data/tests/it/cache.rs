//! The token cache: built once, mapped afterwards, rebuilt when damaged.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::fixture::{data_path, read_records, tokenizer_with, write_tokenizer};
use tandem_data::forest::{ForestBuilder, RowCounts, ScoredTokens, UnpairedTokens};
use tandem_data::prepare::prepare;
use tandem_data::progress::{Progress, Silent};
use tandem_data::record::RowKind;
use tandem_data::report::{AffectedRows, Reason};
use tandem_data::row::{LossMask, RowOptions, TokenRow, tokenise};
use tandem_data::source::{Source, Sources};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::Forest;

struct Bench {
    folder: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Bench {
    fn new() -> Self {
        let (folder, tokenizer) = tokenizer_with(false, None);
        Self { folder, tokenizer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn prepare(&self, sources: impl Into<Sources>, options: &RowOptions) -> TokenCache {
        prepare(&sources.into(), &self.tokenizer, options, &self.path("cache"), &Silent).unwrap()
    }

    fn cached_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path("cache")).unwrap().map(|e| e.unwrap().path());
        entries.filter(|p| p.extension().is_some_and(|e| e != "lock" && e != "places")).collect()
    }
}

fn check_counts(forest: &Forest, found: RowCounts) {
    let (tokens, scored_rows) = (forest.num_tokens(), forest.scored_rows().0.len());
    let expected = (tokens, scored_rows, forest.groups().len());
    assert_eq!((found.tokens, found.scored_rows, found.trees), expected);
}

fn preference() -> RowOptions {
    RowOptions::new(RowKind::Preference)
}

#[test]
fn rows_come_back_as_they_were_tokenised_and_the_second_run_maps_them() {
    let bench = Bench::new();
    for (file, kind) in [
        ("pref_conv.jsonl", RowKind::Preference),
        ("pref_plain_implicit.jsonl", RowKind::Preference),
        ("../../../../goldens/small/pref_margin.jsonl", RowKind::Reward),
        ("sft_messages.jsonl", RowKind::Supervised),
        ("sft_completion.jsonl", RowKind::Supervised),
        ("../../../../goldens/small/unpaired.jsonl", RowKind::Unpaired),
        ("pref_conv.jsonl", RowKind::Prompt),
        ("pref_plain.jsonl", RowKind::Prompt),
    ] {
        let options = RowOptions { max_length: Some(60), ..RowOptions::new(kind) };
        let first = bench.prepare(data_path(file), &options);
        let again = bench.prepare(data_path(file), &options);
        assert!(first.was_built() && !again.was_built());
        assert_eq!(first.content_hash(), again.content_hash());
        assert_eq!(first.report(), again.report());
        let mut row = 0;
        for (line, record) in (1..).zip(read_records(file, kind)) {
            let Some(expected) = tokenise(&record, &bench.tokenizer, &options).unwrap().row else { continue };
            match kind {
                RowKind::Preference => {
                    let pair = again.pair(row);
                    assert_eq!(Some(pair), expected.as_pair());
                    for share in [true, false] {
                        assert_eq!(again.num_tokens(row, share), pair.num_tokens(share));
                        let mut builder = ForestBuilder::new(share);
                        builder.push_pair(&pair);
                        check_counts(&builder.finish().unwrap(), again.counts(row, share));
                    }
                }
                RowKind::Reward => {
                    let pair = again.pair(row);
                    assert_eq!(Some(pair), expected.as_pair());
                    assert_eq!(again.margin(row), record.margin);
                    assert!(pair.lengths().into_iter().all(|length| length <= 60), "none is cut");
                    for share in [true, false] {
                        let mut builder = ForestBuilder::new(share);
                        builder.push_ends(pair.prompt, &[pair.chosen, pair.rejected], None);
                        check_counts(&builder.finish().unwrap(), again.counts(row, share));
                    }
                }
                RowKind::Unpaired => {
                    let UnpairedTokens { prompt, completion, label } = again.unpaired(row);
                    let (prompt, completion) = (prompt.to_vec(), completion.to_vec());
                    assert!(prompt.len() + completion.len() <= 60 && label == record.label);
                    for share in [true, false] {
                        assert_eq!(again.num_tokens(row, share), prompt.len() + completion.len());
                        let mut builder = ForestBuilder::new(share);
                        builder.push_answers(&prompt, &[&completion], 0);
                        check_counts(&builder.finish().unwrap(), again.counts(row, share));
                    }
                    assert_eq!(expected, TokenRow::Unpaired { prompt, completion, label });
                }
                RowKind::Supervised => {
                    let ScoredTokens { tokens, scored } = again.scored(row);
                    let found = TokenRow::Scored { tokens: tokens.to_vec(), scored: scored.to_vec() };
                    assert_eq!(found, expected);
                    assert_eq!(again.num_tokens(row, true), again.scored(row).tokens.len());
                    let mut builder = ForestBuilder::default();
                    builder.push_scored(&again.scored(row));
                    check_counts(&builder.finish().unwrap(), again.counts(row, true));
                }
                RowKind::Prompt => {
                    let (tokens, json) = again.prompt(row);
                    assert_eq!(json, serde_json::to_vec(&record.row).unwrap(), "the row goes along whole");
                    let json = String::from_utf8(json.to_vec()).unwrap();
                    assert_eq!(expected, TokenRow::Prompt { tokens: tokens.to_vec(), row: json });
                    assert!((1..=60).contains(&tokens.len()) && again.num_tokens(row, true) == tokens.len());
                }
            }
            assert_eq!(again.origin(row).line, line);
            row += 1;
        }
        assert_eq!(again.num_rows(), row);
        if kind == RowKind::Reward {
            let dropped = again.report().count(Reason::TooLong);
            assert!(dropped > 0 && dropped + row as u64 == again.report().rows_read, "{dropped} dropped");
            assert!((0..row).any(|row| again.margin(row) == 0.75));
        }
    }
}

#[test]
fn json_arrays_and_lines_give_the_same_rows() {
    let bench = Bench::new();
    let text = std::fs::read_to_string(data_path("pref_plain.jsonl")).unwrap();
    let array = bench.path("array.json");
    let elements: Vec<_> = text.lines().collect();
    std::fs::write(&array, format!("[\n{}\n]", elements.join(",\n"))).unwrap();
    let lines = bench.prepare(data_path("pref_plain.jsonl"), &preference());
    let array = bench.prepare(array, &preference());
    assert_eq!(array.num_rows(), lines.num_rows());
    for i in 0..lines.num_rows() {
        assert_eq!(array.pair(i), lines.pair(i));
        assert_eq!(array.origin(i).line, lines.origin(i).line + 1, "the bracket is on a line of its own");
    }
}

#[test]
fn everything_that_decides_the_tokens_is_part_of_the_key() {
    let mut bench = Bench::new();
    let data = bench.path("data.jsonl");
    let text = std::fs::read_to_string(data_path("pref_conv.jsonl")).unwrap();
    std::fs::write(&data, &text).unwrap();
    let mut count = 0;
    let mut built = |bench: &Bench, sources: Sources, options: RowOptions| {
        let cache = bench.prepare(sources.clone(), &options);
        assert!(cache.was_built(), "number {count} found another one's cache");
        assert!(!bench.prepare(sources, &options).was_built(), "number {count}");
        count += 1;
        assert_eq!(bench.cached_files().len(), count);
    };
    let source = || Sources::from(data.clone());
    built(&bench, source(), preference());
    built(&bench, source(), RowOptions { max_length: Some(100), ..preference() });
    built(&bench, source(), RowOptions { loss_on: LossMask::All, ..preference() });
    built(&bench, Sources(vec![Source { path: data.clone(), weight: 2.0 }]), preference());
    built(&bench, Sources([source().0, source().0].concat()), preference());
    // The same data under another name have the same key.
    std::fs::rename(&data, bench.path("renamed.jsonl")).unwrap();
    let renamed = bench.prepare(bench.path("renamed.jsonl"), &preference());
    assert!(!renamed.was_built());
    assert_eq!(renamed.origin(0).to_string(), format!("{}:1", bench.path("renamed.jsonl").display()));
    std::fs::write(&data, text.replacen("you", "we", 1)).unwrap();
    built(&bench, source(), preference());
    // Another template, another tokenizer, another special token.
    let folder = bench.folder.path().to_path_buf();
    let mut with = |change: &dyn Fn(&Path)| {
        change(&folder);
        bench.tokenizer = Tokenizer::from_folder(&folder).unwrap();
        built(&bench, source(), preference());
    };
    with(&|folder| write_tokenizer(folder, false, Some("markers")));
    with(&|folder| write_tokenizer(folder, true, Some("markers")));
    with(&|folder| {
        let path = folder.join("tokenizer_config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, config.replace("\"eos_token\": \"</s>\"", "\"eos_token\": \"<|end|>\""))
            .unwrap();
    });
    // The ends of turns, which are scored.
    with(&|folder| {
        std::fs::write(folder.join("generation_config.json"), r#"{"eos_token_id": [2, 7]}"#).unwrap();
    });
}

/// Observer that keeps its messages.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn note(&self, message: &str) {
        self.0.lock().unwrap().push(message.into());
    }
}

#[test]
fn a_damaged_cache_is_noticed_and_made_again() {
    let bench = Bench::new();
    let whole = bench.prepare(data_path("pref_plain.jsonl"), &preference());
    let (path, hash) = (whole.path().to_path_buf(), whole.content_hash());
    let content = std::fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut content = content.clone();
        content[at] ^= 4;
        content
    };
    let damages = [
        (content[..content.len() - 1].to_vec(), "length"),
        (content[..100].to_vec(), "shorter than its header"),
        (Vec::new(), "empty"),
        (flipped(0), "does not begin"),
        (flipped(8), "format version"),
        (flipped(40), "header is damaged"),
        (flipped(300), "content is damaged"),
        (flipped(content.len() - 1), "content is damaged"),
    ];
    for (damaged, reason) in damages {
        // Replaced as by another process: `whole` still maps the old file.
        let other = bench.path("cache/other");
        std::fs::write(&other, damaged).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let notes = Notes::default();
        let sources = Sources::from(data_path("pref_plain.jsonl"));
        let again = prepare(&sources, &bench.tokenizer, &preference(), &bench.path("cache"), &notes).unwrap();
        assert!(again.was_built());
        let notes = notes.0.into_inner().unwrap();
        assert!(notes.len() == 1 && notes[0].contains(reason), "{notes:?} should say {reason}");
        assert_eq!((again.content_hash(), std::fs::read(&path).unwrap()), (hash, content.clone()));
    }
    // The file with the lines of the rows is part of the cache.
    let places = path.with_extension("places");
    let other = bench.prepare(data_path("pref_conv.jsonl"), &preference());
    let mut flipped = std::fs::read(&places).unwrap();
    flipped[70] ^= 4;
    for (damaged, reason) in [
        (None, "missing"),
        (Some(vec![0; 31]), "cut off"),
        (Some(flipped), "damaged"),
        (Some(std::fs::read(other.path().with_extension("places")).unwrap()), "made from other data"),
    ] {
        std::fs::remove_file(&places).unwrap();
        damaged.iter().for_each(|damaged| std::fs::write(&places, damaged).unwrap());
        let notes = Notes::default();
        let sources = Sources::from(data_path("pref_plain.jsonl"));
        let again = prepare(&sources, &bench.tokenizer, &preference(), &bench.path("cache"), &notes).unwrap();
        let notes = notes.0.into_inner().unwrap();
        assert!(again.was_built() && notes.len() == 1 && notes[0].contains(reason), "{notes:?}, {reason}");
    }
    assert_eq!(bench.cached_files().len(), 2);
}

/// Appends a row to a file when tokenisation begins.
struct Appends(PathBuf);

impl Progress for Appends {
    fn start(&self, _what: &str, _total: u64) {
        use std::io::Write;
        let mut file = std::fs::File::options().append(true).open(&self.0).unwrap();
        file.write_all(b"{\"prompt\": \"a\", \"chosen\": \" b\", \"rejected\": \" c\"}\n").unwrap();
    }
}

#[test]
fn a_file_that_changes_while_it_is_tokenised_is_not_taken_for_what_it_was() {
    let bench = Bench::new();
    let data = bench.path("data.jsonl");
    std::fs::copy(data_path("pref_plain.jsonl"), &data).unwrap();
    let (sources, progress) = (Sources::from(data.clone()), Appends(data.clone()));
    let failed = prepare(&sources, &bench.tokenizer, &preference(), &bench.path("cache"), &progress);
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("data.jsonl: changed during tokenisation"), "{error}");
    assert!(bench.cached_files().is_empty());
    assert_eq!(bench.prepare(data, &preference()).num_rows(), 9);
}

#[test]
fn two_at_once_make_one_cache() {
    let bench = Bench::new();
    // Files of a dead process are removed.
    let name = bench.prepare(data_path("pref_conv.jsonl"), &preference()).path().to_path_buf();
    let abandoned = name.with_extension("123-0.tmp");
    std::fs::remove_file(&name).unwrap();
    std::fs::write(&abandoned, "half").unwrap();
    let caches: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| bench.prepare(data_path("pref_conv.jsonl"), &preference())))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(caches.iter().filter(|c| c.was_built()).count(), 1);
    assert!(caches.iter().all(|c| c.content_hash() == caches[0].content_hash() && c.num_rows() == 8));
    assert_eq!(bench.cached_files(), [name]);
}

#[test]
fn weights_repeat_whole_passes_and_thin_evenly() {
    let bench = Bench::new();
    let file = |weight| Source { path: data_path("pref_plain.jsonl"), weight };
    let lines = |cache: &TokenCache| (0..cache.num_rows()).map(|i| cache.origin(i).line).collect::<Vec<_>>();
    let cache = bench.prepare(Sources(vec![file(1.5), file(0.25)]), &preference());
    assert_eq!(lines(&cache), [1, 2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 4, 8]);
    assert_eq!(cache.pair(8), cache.pair(1));
    assert_eq!(cache.report().count(Reason::LeftOutByWeight), 6);
    assert_eq!((cache.report().rows_read, cache.report().rows_kept), (16, 14));
}

/// Labels in a row as (label, first prompt, last prompt). The expected runs are those of
/// `trl.data_utils.unpair_preference_dataset` of trl 1.16 on the same 2003 pairs.
#[test]
fn pairs_become_labelled_completions_in_the_order_of_trl() {
    let bench = Bench::new();
    let options = RowOptions::new(RowKind::Unpaired);
    let words = ["prompt", "chosen", "rejected"];
    let pair = |i: usize| words.map(|word| format!("{word} {i}"));
    let json = |range: std::ops::Range<usize>| -> String {
        let line = |i| {
            let [prompt, chosen, rejected] = pair(i);
            format!("{{\"prompt\": \"{prompt}\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}\n")
        };
        range.map(line).collect()
    };
    let csv = |range: std::ops::Range<usize>| -> String {
        let lines = range.map(|i| pair(i).join(",") + "\n");
        std::iter::once(words.join(",") + "\n").chain(lines).collect()
    };
    let write = |name: &str, text: String| {
        std::fs::write(bench.path(name), text).unwrap();
        Source::new(bench.path(name))
    };
    let whole = bench.prepare(Sources(vec![write("whole.jsonl", json(0..2003))]), &options);
    let runs = [(true, 0, 999), (false, 0, 999), (true, 1000, 1999), (false, 1000, 1999), (true, 2000, 2002)];
    let expected: Vec<(bool, usize)> = runs
        .into_iter()
        .chain([(false, 2000, 2002)])
        .flat_map(|(label, first, last)| (first..=last).map(move |i| (label, i)))
        .collect();
    assert_eq!((whole.report().rows_read, whole.report().rows_kept), (2003, 4006));
    // The same completions, as a file that is labelled already.
    let labelled = expected.iter().map(|&(label, i)| {
        let [prompt, chosen, rejected] = pair(i);
        let completion = if label { chosen } else { rejected };
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\", \"label\": {label}}}\n")
    });
    let labelled = bench.prepare(Sources(vec![write("labelled.jsonl", labelled.collect())]), &options);
    assert_eq!(whole.num_rows(), labelled.num_rows());
    for (row, (label, line)) in expected.into_iter().enumerate() {
        let (found, expected) = (whole.unpaired(row), labelled.unpaired(row));
        assert_eq!((found.prompt, found.completion), (expected.prompt, expected.completion), "row {row}");
        assert_eq!((found.label, expected.label), (label, label), "row {row}");
        assert_eq!(whole.origin(row).line as usize, line + 1);
    }
    let parts = vec![
        write("part.jsonl", json(0..700)),
        write("part.csv", csv(700..1500)),
        write("end.json", format!("[{}]", json(1500..2003).trim_end().replace('\n', ","))),
    ];
    assert_eq!(bench.prepare(Sources(parts), &options).content_hash(), whole.content_hash());
}

#[test]
fn weights_and_limits_count_the_completions_of_pairs() {
    let bench = Bench::new();
    let options = RowOptions::new(RowKind::Unpaired);
    let file = |weight| Source { path: data_path("pref_plain.jsonl"), weight };
    let rows = |cache: &TokenCache| {
        (0..cache.num_rows()).map(|i| (cache.origin(i).line, cache.unpaired(i).label)).collect::<Vec<_>>()
    };
    let sides = |lines: &[u64]| -> Vec<(u64, bool)> {
        [true, false].into_iter().flat_map(|label| lines.iter().map(move |&line| (line, label))).collect()
    };
    let cache = bench.prepare(Sources(vec![file(1.0), file(1.5), file(0.25)]), &options);
    let all = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(rows(&cache), [sides(&all), sides(&all), sides(&[2, 4, 6, 8]), sides(&[4, 8])].concat());
    let three = bench.prepare(Sources(vec![file(1.0)]), &RowOptions { max_rows: Some(3), ..options.clone() });
    assert_eq!(rows(&three), [(1, true), (2, true), (1, false)]);
    // A pair of which both completions are cut is one row that is cut.
    let data = bench.path("long.jsonl");
    let row = "{\"prompt\": \"a\", \"chosen\": \" long answer\", \"rejected\": \" longer answer\"}\n";
    std::fs::write(&data, row.repeat(3)).unwrap();
    let cut = bench.prepare(data, &RowOptions { max_length: Some(2), ..options });
    assert_eq!((cut.report().count(Reason::Truncated), cut.num_rows()), (3, 6));
}

#[test]
fn a_report_does_not_grow_with_the_rows_that_it_is_about() {
    let bench = Bench::new();
    let data = bench.path("data.jsonl");
    let row = "{\"prompt\": \"a\", \"chosen\": \" b\", \"rejected\": \" a longer answer\"}\n";
    std::fs::write(&data, row.repeat(AffectedRows::PLACES + 20)).unwrap();
    let cache = bench.prepare(data, &RowOptions { max_length: Some(2), ..preference() });
    let report = cache.report();
    assert_eq!(report.count(Reason::RejectedTruncated), AffectedRows::PLACES as u64 + 20);
    let lines = report.reasons[&Reason::RejectedTruncated].first.iter().copied();
    assert!(lines.eq(0..AffectedRows::PLACES as u64));
    assert!(cache.report_lines().join("\n").contains("120 rows (100.0 %) have a rejected answer cut"));
}

#[test]
fn every_row_that_did_not_pass_unchanged_is_counted_with_its_place() {
    let bench = Bench::new();
    let rows = [
        r#"{"prompt": "Explain the num", "chosen": "ber of the day", "rejected": "bing"}"#,
        r#"{"prompt": "a", "chosen": " b", "rejected": " this one is a good deal longer than the other"}"#,
        r#"{"prompt": "a prompt that is longer than all the rest of it", "chosen": " b", "rejected": " c"}"#,
        r#"{"prompt": "a", "chosen": " b", "rejected": " c"}"#,
    ];
    let data = bench.path("data.jsonl");
    std::fs::write(&data, rows.join("\n")).unwrap();
    let cache = bench.prepare(data, &RowOptions { max_length: Some(8), ..preference() });
    let report = cache.report();
    assert_eq!((report.rows_read, report.rows_kept, report.longest), (4, 3, 8));
    let lines =
        |reason| report.reasons.get(&reason).unwrap().first.iter().map(|row| row + 1).collect::<Vec<_>>();
    assert_eq!(lines(Reason::Merged), [1]);
    assert_eq!(lines(Reason::Truncated), [1]);
    assert_eq!(lines(Reason::RejectedTruncated), [2]);
    assert_eq!(lines(Reason::PromptTooLong), [3]);
    assert_eq!([0, 1, 2].map(|i| cache.origin(i).line), [1, 2, 4]);
    let text = cache.report_lines().join("\n");
    assert!(text.contains("data.jsonl:3") && text.contains("1 row (25.0 %) dropped: the prompt"), "{text}");
    let largest =
        (0..3).flat_map(|i| [cache.pair(i).prompt, cache.pair(i).chosen, cache.pair(i).rejected].concat());
    assert_eq!(report.largest_id, largest.max().unwrap());
}

#[test]
fn a_name_that_disagrees_with_the_content_is_refused_with_and_without_a_cache() {
    let bench = Bench::new();
    let rows = data_path("formats/rows.parquet");
    let cached = bench.prepare(rows.clone(), &preference());
    assert!(cached.num_rows() > 0);
    for name in ["rows.csv", "rows.jsonl"] {
        let other = bench.path(name);
        std::fs::copy(&rows, &other).unwrap();
        let sources = Sources::from(other);
        let error = prepare(&sources, &bench.tokenizer, &preference(), &bench.path("cache"), &Silent);
        assert!(error.unwrap_err().to_string().ends_with("Parquet by its content: rename it"), "{name}");
    }
    // Equal bytes are other rows where the name says another separator.
    let [commas, tabs] = ["table.csv", "table.tsv"].map(|name| bench.path(name));
    std::fs::write(&commas, "prompt,chosen,rejected\na, b, c\n").unwrap();
    std::fs::copy(&commas, &tabs).unwrap();
    assert_eq!(bench.prepare(commas, &preference()).num_rows(), 1);
    let error = prepare(&Sources::from(tabs), &bench.tokenizer, &preference(), &bench.path("cache"), &Silent);
    assert!(error.unwrap_err().to_string().contains("expected the keys"));
}
