//! Round trips to the bit, damage of every kind, and a disk that fails at every single operation.

use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::disk::failing::Failing;
use crate::error::{Result, TrainError};

/// Ranks, so that the tensors below lie in two files.
const RANKS: usize = 2;

fn cursor(step: u64) -> Cursor {
    let answer = Answer {
        tokens: vec![7, 2],
        turns: vec![Turn {
            tokens: [0, 2],
            messages: vec![[("role".to_owned(), "user".into())].into_iter().collect()],
        }],
        is_ended: true,
        log_prob: -1.0 / 3.0,
        log_probs: vec![-0.25, -1.0 / 12.0],
        old_log_probs: vec![-0.5, -1.0 / 7.0],
        normalized: Some(-1.0 / 3.0),
        score: Some(0.1 + 0.2),
        opinions: vec![JudgeScore { score: None, said: "nothing".into() }],
    };
    let answered = CompletedPrompt { row: 3, answers: vec![answer, Answer::default()] };
    let batch = Batch { step: 9, answered_after: 8, prompts: vec![answered.clone()], replaced: 0 };
    Cursor {
        online: Some(OnlineState {
            pending: [batch.clone()].into(),
            unjudged: vec![batch],
            replay: [answered].into(),
        }),
        step,
        updates: step - 1,
        epoch: 2,
        position: 17,
        seed: 42,
        data_hash: "00ff".into(),
        num_tokens: 123_456_789_012,
        skipped: 1,
        skipped_in_row: 0,
        seconds: 0.1 + step as f64,
        schedule_free: None,
        rewards: Some(crate::objective::RewardMean { mean: -1.0 / 3.0, count: 1 << 40 }),
        learning_rate_factor: Some(0.1 + 0.2),
        best: Some(BestEvaluation {
            metric: "eval/loss".into(),
            rows: "a1".into(),
            value: 0.1 + 0.2,
            step: step / 2,
            evaluations_since: 3,
        }),
        is_evaluation_due: true,
    }
}

/// Values whose bits a careless copy would change: signed zero, a NaN with a payload, a subnormal.
fn values(step: u64) -> Vec<f32> {
    let odd = [-0.0, f32::from_bits(0x7fc0_1234), f32::from_bits(1), f32::NEG_INFINITY];
    odd.into_iter().chain((0..16).map(|i| 1.0 / (step as f32 + i as f32))).collect()
}

fn tensors(values: &[f32]) -> Vec<TensorShard<'_>> {
    let tensor = |name: &str, shape: &[usize], data| {
        TensorShard::new(TensorSpec { name: name.into(), shape: shape.to_vec() }, 0, data)
    };
    vec![
        tensor("model.embed.weight", &[3, 4], &values[..12]),
        tensor("model.norm.weight", &[7], &values[12..19]),
        tensor("adamw.exp_avg.scalar", &[], &values[19..20]),
    ]
}

fn elements<'a>(data: &StatesView<'a>) -> &'a [f32] {
    data.as_f32().expect("f32")
}

/// A rank's part: its share of all elements in order, wherever that cuts a tensor.
fn share<'a>(tensors: &[TensorShard<'a>], rank: usize, num_ranks: usize) -> Vec<TensorShard<'a>> {
    let total: usize = tensors.iter().map(|t| t.data.len()).sum();
    pieces(tensors, total * rank / num_ranks..total * (rank + 1) / num_ranks)
}

/// The tensors' parts within a range of all elements in order.
fn pieces<'a>(tensors: &[TensorShard<'a>], mine: Range<usize>) -> Vec<TensorShard<'a>> {
    let mut before = 0;
    let mut pieces = Vec::new();
    for TensorShard { tensor, data, .. } in tensors {
        let [start, end] = [mine.start, mine.end].map(|at| at.clamp(before, before + data.len()) - before);
        if start < end {
            pieces.push(TensorShard::new(tensor.clone(), start, &elements(data)[start..end]));
        }
        before += data.len();
    }
    pieces
}

fn save_as(checkpoints: &Checkpoints, step: u64, num_ranks: usize) -> Result<PathBuf> {
    let values = values(step);
    let parts = |rank| {
        let pieces = share(&tensors(&values), rank, num_ranks);
        checkpoints.write_part(step, rank, num_ranks, &pieces, &AtomicBool::new(false))
    };
    let saved = checkpoints.begin(step).and_then(|()| {
        let parts = (0..num_ranks).map(parts).collect::<Result<Vec<_>>>()?;
        checkpoints.publish(&cursor(step), &parts)
    });
    if saved.is_err() {
        checkpoints.abandon(step);
    }
    saved
}

fn save(checkpoints: &Checkpoints, step: u64) -> Result<PathBuf> {
    save_as(checkpoints, step, RANKS)
}

fn assert_holds(checkpoint: &Checkpoint, step: u64) {
    assert_eq!(checkpoint.cursor(), &cursor(step));
    let values = values(step);
    for tensor in tensors(&values) {
        let mut out = vec![0.0; tensor.tensor.len()];
        checkpoint.read(&tensor.tensor.name, 0, &mut out).expect("a stored tensor");
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&out), bits(elements(&tensor.data)), "{}", tensor.tensor.name);
    }
}

fn newest(checkpoints: &Checkpoints) -> (Option<Checkpoint>, Vec<String>) {
    let latest = checkpoints.latest().expect("a folder that can be listed");
    (latest.checkpoint, latest.skipped.iter().map(ToString::to_string).collect())
}

fn setup(steps: &[u64]) -> (TempDir, Checkpoints) {
    let folder = TempDir::new().expect("a temporary folder");
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
    for step in steps {
        save(&checkpoints, *step).expect("a save");
    }
    (folder, checkpoints)
}

#[test]
fn a_checkpoint_reads_back_to_the_bit() {
    let (_folder, checkpoints) = setup(&[200]);
    let path = checkpoints.root().join("step-000200");
    let checkpoint = Checkpoint::open(&path).expect("a complete checkpoint");
    assert_holds(&checkpoint, 200);
    let stored: Vec<TensorSpec> = checkpoint.tensors().cloned().collect();
    let values = values(200);
    assert_eq!(stored, tensors(&values).into_iter().map(|t| t.tensor).collect::<Vec<_>>());
    assert!(path.join("state-00002-of-00002.safetensors").exists());
    let mut middle = [0.0; 2];
    checkpoint.read("model.norm.weight", 3, &mut middle).expect("a range");
    assert_eq!(middle, values[15..17]);
}

#[test]
fn tensors_longer_than_a_chunk_survive() {
    let (_folder, checkpoints) = setup(&[]);
    let data: Vec<f32> = (0..2 * CHUNK + 3).map(|i| i as f32).collect();
    let tensor = TensorSpec { name: "long".into(), shape: vec![data.len()] };
    let cut = CHUNK + 7;
    checkpoints.begin(1).expect("a folder");
    let parts = [(0, 0, &data[..cut]), (1, cut, &data[cut..])].map(|(rank, start, data)| {
        let piece = TensorShard::new(tensor.clone(), start, data);
        checkpoints.write_part(1, rank, 2, &[piece], &AtomicBool::new(false)).expect("a part")
    });
    let path = checkpoints.publish(&cursor(1), &parts).expect("a save");
    let checkpoint = Checkpoint::open(&path).expect("a complete checkpoint");
    let mut out = vec![0.0; CHUNK + 5];
    checkpoint.read("long", CHUNK - 2, &mut out).expect("a range across files");
    assert_eq!(out, data[CHUNK - 2..2 * CHUNK + 3]);
}

/// Every tensor, and every range of it, however many ranks have written it and wherever they have
/// cut it.
#[test]
fn any_number_of_writers_gives_the_same_tensors() {
    for num_ranks in [1, 2, 3, 7, 20, 33] {
        let (_folder, checkpoints) = setup(&[]);
        let path = save_as(&checkpoints, 5, num_ranks).expect("a save");
        let checkpoint = Checkpoint::open(&path).expect("a complete checkpoint");
        assert_holds(&checkpoint, 5);
        let values = values(5);
        for start in 0..12 {
            for end in start..12 {
                let mut out = vec![0.0; end - start];
                checkpoint.read("model.embed.weight", start, &mut out).expect("a range");
                let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&out), bits(&values[start..end]), "{num_ranks} ranks, {start}..{end}");
            }
        }
    }
}

/// A matrix of three columns: two ranks share the first in turns, a third rank has the others.
#[test]
fn columns_of_several_writers_are_one_matrix() {
    let (_folder, checkpoints) = setup(&[]);
    let tensor = TensorSpec { name: "out".into(), shape: vec![4, 3] };
    let (first, others) = ([0.0, 3.0, 6.0, 9.0], [1.0, 2.0, 4.0, 5.0, 7.0, 8.0, 10.0, 11.0]);
    let parts: [(Range<usize>, usize, &[f32]); 3] =
        [(1..3, 0, &others), (0..1, 0, &first[..3]), (0..1, 3, &first[3..])];
    let write = |step: u64, parts: &[(Range<usize>, usize, &[f32])]| {
        checkpoints.begin(step)?;
        let written = parts.iter().enumerate().map(|(rank, (columns, start, data))| {
            let piece = TensorShard {
                tensor: tensor.clone(),
                columns: columns.clone(),
                start: *start,
                data: (*data).into(),
            };
            checkpoints.write_part(step, rank, parts.len(), &[piece], &AtomicBool::new(false))
        });
        checkpoints.publish(&cursor(step), &written.collect::<Result<Vec<_>>>()?)
    };
    let path = write(1, &parts).expect("a save");
    let checkpoint = Checkpoint::open(&path).expect("a complete checkpoint");
    assert_eq!(checkpoint.tensors().collect::<Vec<_>>(), [&tensor]);
    for start in 0..12 {
        for end in start..12 {
            let mut out = vec![f32::NAN; end - start];
            checkpoint.read("out", start, &mut out).expect("a range");
            assert_eq!(out, (start..end).map(|i| i as f32).collect::<Vec<_>>());
        }
    }
    for (step, left_out, reason) in [
        (2, 0, "\"out\": its columns end with 1 of 3"),
        (3, 1, "\"out\": a piece begins with element 3, expected 0"),
        (4, 2, "\"out\": its pieces end with element 3 of 4"),
    ] {
        let mut parts = parts.to_vec();
        parts.remove(left_out);
        let path = write(step, &parts).expect("a save");
        let error = Checkpoint::open(&path).expect_err("not the whole matrix").to_string();
        assert!(error.contains(reason), "{error}");
    }
}

/// Format 1 had whole tensors only, and no number of ranks in its manifest.
#[test]
fn a_checkpoint_of_the_first_format_is_read() {
    let (_folder, checkpoints) = setup(&[]);
    let path = save_as(&checkpoints, 1, 1).expect("a save");
    let manifest = path.join("manifest.json");
    replace(&manifest, "\"format\": 2", "\"format\": 1");
    replace(&manifest, "  \"ranks\": 1,\n", "");
    assert_holds(&newest(&checkpoints).0.expect("a checkpoint"), 1);
}

/// A manifest that leaves out a rank's file (or names another's twice) is consistent in itself.
#[test]
fn a_tensor_of_which_a_piece_is_missing_is_refused() {
    let (_folder, checkpoints) = setup(&[]);
    let path = save_as(&checkpoints, 1, 3).expect("a save");
    let manifest = path.join("manifest.json");
    let mut value: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&manifest).expect("text")).expect("JSON");
    value["files"].as_array_mut().expect("a list").remove(0);
    fs::write(&manifest, value.to_string()).expect("written");
    let (found, skipped) = newest(&checkpoints);
    assert!(found.is_none());
    assert!(
        skipped[0].contains("\"model.embed.weight\": a piece begins with element 6, expected 0"),
        "{skipped:?}"
    );
}

#[test]
fn ranks_that_do_not_share_the_folder_are_told_so() {
    let (_folder, checkpoints) = setup(&[]);
    let (_elsewhere, others) = setup(&[]);
    let values = values(1);
    let write = |checkpoints: &Checkpoints, rank| {
        let pieces = share(&tensors(&values), rank, 2);
        checkpoints.write_part(1, rank, 2, &pieces, &AtomicBool::new(false))
    };
    checkpoints.begin(1).expect("a folder");
    let first = write(&checkpoints, 0).expect("a part");
    let error = write(&others, 1).expect_err("the folder is not there").to_string();
    assert!(error.contains("rank 0") && error.contains("rank 1") && error.contains("share"), "{error}");
    // A folder of that name, but another one.
    others.begin(1).expect("a folder");
    let second = write(&others, 1).expect("a part");
    let error =
        checkpoints.publish(&cursor(1), &[first, second]).expect_err("the part is not there").to_string();
    assert!(error.contains("state-00002-of-00002") && error.contains("share"), "{error}");
    assert!(newest(&checkpoints).0.is_none());
}

#[test]
fn reading_a_missing_tensor_or_past_its_end_is_refused() {
    let (_folder, checkpoints) = setup(&[1]);
    let (checkpoint, _) = newest(&checkpoints);
    let checkpoint = checkpoint.expect("a checkpoint");
    let missing = checkpoint.read("model.nothing", 0, &mut [0.0]).expect_err("no such tensor").to_string();
    assert!(missing.contains("model.nothing"), "{missing}");
    let long = checkpoint.read("model.norm.weight", 5, &mut [0.0; 3]).expect_err("too long").to_string();
    assert!(long.contains("[7]") && long.contains("5..8"), "{long}");
}

/// Fewer elements than are stored could be read without complaint: the wrong weights, silently.
#[test]
fn a_tensor_of_another_shape_is_refused() {
    let (_folder, checkpoints) = setup(&[1]);
    let checkpoint = newest(&checkpoints).0.expect("a checkpoint");
    let spec = |shape: &[usize]| TensorSpec { name: "model.embed.weight".into(), shape: shape.to_vec() };
    for shape in [&[3, 2][..], &[4, 3], &[12]] {
        let error = checkpoint.check_tensor(&spec(shape)).expect_err("another shape").to_string();
        assert!(error.contains("[3, 4]") && error.contains(&format!("{shape:?}")), "{error}");
    }
    checkpoint.check_tensor(&spec(&[3, 4])).expect("the stored shape");
    let mut out = [0.0; 8];
    checkpoint.read("model.embed.weight", 4, &mut out).expect("it is there");
    assert_eq!(out, values(1)[4..12]);
}

/// Other programs must be able to read the files: the header is checked against the format's own
/// words.
#[test]
fn a_ranks_file_is_safetensors() {
    let (_folder, checkpoints) = setup(&[1]);
    let path = checkpoints.root().join("step-000001/state-00001-of-00002.safetensors");
    let bytes = fs::read(path).expect("a file");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    assert_eq!((8 + length) % 8, 0, "data must be aligned");
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a JSON header");
    // Half of the twenty elements.
    let expected = serde_json::json!({
        "__metadata__": {"model.embed.weight": "[3,4]"},
        "model.embed.weight[0..10]": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]},
    });
    assert_eq!(header, expected);
    assert_eq!(bytes.len(), 8 + length + 40);
    assert_eq!(bytes[8 + length..12 + length], (-0.0f32).to_le_bytes());
    let path = checkpoints.root().join("step-000001/state-00002-of-00002.safetensors");
    let bytes = fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(file.tensor("model.norm.weight").expect("a whole tensor").shape(), [7]);
    assert_eq!(file.tensor("model.embed.weight[10..12]").expect("a piece").shape(), [2]);
}

#[test]
fn the_newest_complete_one_is_found_and_keep_deletes_the_oldest() {
    let (_folder, checkpoints) = setup(&[9, 10, 100, 1_000_000]);
    assert_eq!(checkpoints.steps().expect("a listing"), [9, 10, 100, 1_000_000]);
    assert_holds(&newest(&checkpoints).0.expect("a checkpoint"), 1_000_000);
    checkpoints.prune(2, 1_000_000, None).expect("deleting");
    assert_eq!(checkpoints.steps().expect("a listing"), [100, 1_000_000]);
    checkpoints.prune(0, 1_000_000, None).expect("deleting");
    assert_eq!(checkpoints.steps().expect("a listing"), [1_000_000], "the newest is always kept");
}

#[test]
fn the_best_one_is_kept_beside_the_newest() {
    let (_folder, checkpoints) = setup(&[9, 10, 100, 200]);
    checkpoints.prune(2, 200, Some(10)).expect("deleting");
    assert_eq!(checkpoints.steps().expect("a listing"), [10, 100, 200]);
    checkpoints.prune(2, 200, Some(100)).expect("deleting");
    assert_eq!(checkpoints.steps().expect("a listing"), [100, 200]);
}

#[test]
fn keep_counts_only_checkpoints_up_to_the_one_just_saved() {
    // The run resumed from 20 because 30 was damaged, and has just saved 25.
    let (_folder, checkpoints) = setup(&[10, 20, 30, 25]);
    checkpoints.prune(1, 25, None).expect("deleting");
    assert_eq!(checkpoints.steps().expect("a listing"), [25, 30]);
}

#[test]
fn a_damaged_checkpoint_is_skipped_with_its_name_and_reason() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &str); 7] = [
        (
            "torn data",
            |p| cut_short(&p.join("state-00002-of-00002.safetensors")),
            "state-00002-of-00002.safetensors has",
        ),
        ("one flipped bit", |p| flip(&p.join("state-00001-of-00002.safetensors"), 100), "has checksum"),
        (
            "missing shard",
            |p| fs::remove_file(p.join("state-00001-of-00002.safetensors")).expect("removed"),
            "is missing",
        ),
        ("changed cursor", |p| flip(&p.join("cursor.json"), 13), "cursor.json has checksum"),
        ("torn manifest", |p| cut_short(&p.join("manifest.json")), "manifest.json: "),
        (
            "no manifest",
            |p| fs::remove_file(p.join("manifest.json")).expect("removed"),
            "manifest.json is missing",
        ),
        (
            "other version",
            |p| replace(&p.join("manifest.json"), "\"format\": 2", "\"format\": 3"),
            "format 3",
        ),
    ];
    for (name, damage, reason) in cases {
        let (_folder, checkpoints) = setup(&[1, 2]);
        damage(&checkpoints.root().join("step-000002"));
        let (found, skipped) = newest(&checkpoints);
        assert_holds(&found.expect("the older one"), 1);
        let [skipped] = &skipped[..] else { panic!("{name}: {skipped:?}") };
        assert!(skipped.contains("step-000002") && skipped.contains(reason), "{name}: {skipped}");
    }
}

#[test]
fn a_manifest_cannot_point_outside_its_folder() {
    let (folder, checkpoints) = setup(&[1]);
    fs::write(folder.path().join("outside"), b"x").expect("a file");
    replace(&checkpoints.root().join("step-000001/manifest.json"), "cursor.json", "../../outside");
    let (found, skipped) = newest(&checkpoints);
    assert!(found.is_none() && skipped[0].contains("plain file name"), "{skipped:?}");
}

#[test]
fn no_checkpoint_is_no_error() {
    let (_folder, checkpoints) = setup(&[]);
    let (found, skipped) = newest(&checkpoints);
    assert!(found.is_none() && skipped.is_empty());
}

#[test]
fn saving_replaces_a_damaged_one_of_the_same_step() {
    let (_folder, checkpoints) = setup(&[1, 2]);
    cut_short(&checkpoints.root().join("step-000002/cursor.json"));
    save(&checkpoints, 2).expect("a save over a damaged one");
    assert_holds(&newest(&checkpoints).0.expect("a checkpoint"), 2);
    assert_eq!(names(checkpoints.root()), ["step-000001", "step-000002"]);
}

#[test]
fn a_full_disk_leaves_the_old_checkpoint_and_no_rubbish() {
    // Less and less is missing: the error comes in the header, the data, the cursor, the manifest.
    let total: u64 = {
        let (_folder, checkpoints) = setup(&[2]);
        let files = names(&checkpoints.root().join("step-000002"));
        files
            .iter()
            .map(|f| fs::metadata(checkpoints.root().join("step-000002").join(f)).expect("a file").len())
            .sum()
    };
    for room in (0..total).step_by(61) {
        let (_folder, checkpoints) = setup(&[1]);
        let disk = Failing::new(room, u64::MAX, false);
        let error = save(&checkpoints.on(disk), 2).expect_err("a full disk");
        assert!(
            matches!(&error, TrainError::Io { action: "write", source, .. } if source.kind() == std::io::ErrorKind::StorageFull),
            "{room} bytes: {error}"
        );
        assert_eq!(names(checkpoints.root()), ["step-000001"], "{room} bytes");
        assert_holds(&newest(&checkpoints).0.expect("the old one"), 1);
    }
}

/// The process dies right before operation n: nothing after it happens, cleaning up included.
/// Whatever n is, a complete checkpoint is found, and the next save goes through and leaves nothing
/// of the accident.
#[test]
fn a_kill_between_any_two_operations_leaves_a_complete_checkpoint() {
    let mut completed = false;
    for operations in 0.. {
        let (_folder, checkpoints) = setup(&[1, 2]);
        // Replacing step 2, the longest path: it also moves the damaged one aside.
        cut_short(&checkpoints.root().join("step-000002/cursor.json"));
        let disk = Failing::new(u64::MAX, operations, true);
        let saved = save(&checkpoints.on(disk.clone()), 2).is_ok();
        let (found, _) = newest(&checkpoints);
        let step = found.as_ref().expect("a complete checkpoint").cursor().step;
        assert_holds(&found.expect("checked above"), step);
        assert!(step == 2 || !saved, "saved, but the newest is step {step}");
        save(&checkpoints, 3).expect("the next save");
        assert!(
            names(checkpoints.root()).iter().all(|n| n.starts_with("step-")),
            "{:?}",
            names(checkpoints.root())
        );
        assert_holds(&newest(&checkpoints).0.expect("a checkpoint"), 3);
        completed = disk.operations.load(Ordering::Relaxed) > 0;
        if completed {
            assert!(saved && operations > 10, "{operations} operations");
            break;
        }
    }
    assert!(completed);
}

#[test]
fn a_writer_gives_up_when_it_is_told_to() {
    let (_folder, checkpoints) = setup(&[1]);
    checkpoints.begin(2).expect("a folder");
    let values = values(2);
    checkpoints.write_part(2, 0, 1, &tensors(&values), &AtomicBool::new(true)).expect_err("it was told to");
    checkpoints.abandon(2);
    assert_eq!(names(checkpoints.root()), ["step-000001"]);
}

#[test]
fn clear_deletes_checkpoints_and_nothing_else() {
    let (_folder, checkpoints) = setup(&[1, 2]);
    fs::write(checkpoints.root().join("notes.txt"), "mine").expect("a file");
    fs::create_dir(checkpoints.root().join(".step-000003.tmp")).expect("a folder");
    checkpoints.clear().expect("clearing");
    assert_eq!(names(checkpoints.root()), ["notes.txt"]);
    fs::remove_file(checkpoints.root().join("notes.txt")).expect("removed");
    checkpoints.clear().expect("clearing");
    assert!(!checkpoints.root().exists());
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

fn cut_short(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).expect("a file");
    file.set_len(file.metadata().expect("a length").len() - 3).expect("truncated");
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).expect("text");
    assert!(text.contains(from), "{from} is not in {text}");
    fs::write(path, text.replace(from, to)).expect("written");
}

/// Tensors of one to three dimensions.
fn any_tensors() -> impl Strategy<Value = Vec<Vec<usize>>> {
    prop::collection::vec(prop::collection::vec(1..6_usize, 0..4), 1..5)
}

proptest! {
    // Each case writes and syncs files.
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any number of ranks writes, each a range of any length; any other number reads, each its range.
    #[test]
    fn any_division_is_read_back_by_any_other(
        shapes in any_tensors(),
        mut cuts in prop::collection::vec(0..400_usize, 0..6),
        num_readers in 1..7_usize,
    ) {
        let folder = TempDir::new().expect("a temporary folder");
        let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
        let lens: Vec<usize> = shapes.iter().map(|shape| shape.iter().product()).collect();
        let total: usize = lens.iter().sum();
        let values: Vec<f32> = (0..total).map(|i| f32::from_bits(0x3f80_0000 ^ (i as u32).wrapping_mul(0x9e37_79b9))).collect();
        let mut offsets = vec![0];
        offsets.extend(lens.iter().scan(0, |end, len| { *end += len; Some(*end) }));
        let whole: Vec<TensorShard> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| {
                let spec = TensorSpec { name: format!("tensor.{i}"), shape: shape.clone() };
                TensorShard::new(spec, 0, &values[offsets[i]..offsets[i + 1]])
            })
            .collect();
        cuts.iter_mut().for_each(|cut| *cut %= total + 1);
        cuts.extend([0, total]);
        cuts.sort_unstable();
        let num_writers = cuts.len() - 1;
        checkpoints.begin(1).expect("a folder");
        let parts: Vec<_> = (0..num_writers)
            .map(|rank| {
                let pieces = pieces(&whole, cuts[rank]..cuts[rank + 1]);
                checkpoints.write_part(1, rank, num_writers, &pieces, &AtomicBool::new(false)).expect("a part")
            })
            .collect();
        let path = checkpoints.publish(&cursor(1), &parts).expect("a save");
        let checkpoint = Checkpoint::open(&path).expect("a complete checkpoint");
        for rank in 0..num_readers {
            let mine = total * rank / num_readers..total * (rank + 1) / num_readers;
            for piece in pieces(&whole, mine) {
                let mut out = vec![0.0; piece.data.len()];
                checkpoint.read(&piece.tensor.name, piece.start, &mut out).expect("a range");
                let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&out), bits(elements(&piece.data)), "{} at {}", piece.tensor.name, piece.start);
            }
        }
    }
}

fn state_of(checkpoint: &Checkpoint) -> blake3::Hash {
    checkpoint.state_hash(&AtomicBool::new(false)).expect("readable").expect("nobody gives up")
}

/// Changes a byte of the last element of a checkpoint of one rank.
fn change_last_element(path: &Path) {
    let part = path.join("state-00001-of-00001.safetensors");
    let mut bytes = fs::read(&part).expect("a part");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(&part, bytes).expect("written");
}

#[test]
fn the_hash_of_a_state_depends_on_its_bits_and_not_on_the_ranks_that_wrote_it() {
    let mut hashes = Vec::new();
    for num_ranks in [1, 2, 3, 5] {
        let (_folder, checkpoints) = setup(&[]);
        let path = save_as(&checkpoints, 7, num_ranks).expect("saved");
        hashes.push(state_of(&Checkpoint::open(&path).expect("complete")));
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
    let (_folder, checkpoints) = setup(&[]);
    let path = save_as(&checkpoints, 7, 1).expect("saved");
    let found = Checkpoint::open(&path).expect("complete");
    assert_eq!(found.state_hash(&AtomicBool::new(true)).expect("readable"), None, "asked to give up");
    change_last_element(&path);
    assert_ne!(state_of(&Checkpoint::open_checked(&path).expect("readable")), hashes[0]);
    let path = save_as(&checkpoints, 8, 1).expect("saved");
    assert_ne!(state_of(&Checkpoint::open(&path).expect("complete")), hashes[0]);
}

/// The clock and evaluations do not enter the hash of a state; all else of the cursor does.
#[test]
fn the_hash_of_a_state_knows_the_cursor_without_clock_and_evaluations() {
    let hash_of = |cursor: &Cursor| {
        let (_folder, checkpoints) = setup(&[]);
        checkpoints.begin(cursor.step).expect("begun");
        let values = values(3);
        let give_up = AtomicBool::new(false);
        let part = checkpoints.write_part(cursor.step, 0, 1, &tensors(&values), &give_up).expect("written");
        state_of(&Checkpoint::open(&checkpoints.publish(cursor, &[part]).expect("saved")).expect("complete"))
    };
    let hash = hash_of(&cursor(3));
    let other = Cursor { seconds: 1e9, best: None, is_evaluation_due: false, ..cursor(3) };
    assert_eq!(hash_of(&other), hash);
    for other in [
        Cursor { updates: 9, ..cursor(3) },
        Cursor { position: 9, ..cursor(3) },
        Cursor { online: None, ..cursor(3) },
        Cursor { learning_rate_factor: None, ..cursor(3) },
    ] {
        assert_ne!(hash_of(&other), hash, "{other:?}");
    }
}

/// Answers of the present weights, and scores, follow from a state; answers of earlier weights do not.
#[test]
fn a_state_has_the_answers_that_do_not_follow_from_its_weights() {
    let state = |answered_after: u64, token: u32, score: Option<f64>| {
        let answer = Answer { tokens: vec![token], score, ..Answer::default() };
        let prompts = vec![CompletedPrompt { row: 3, answers: vec![answer] }];
        let batch = Batch { step: 9, answered_after, prompts, replaced: 0 };
        let (mut pending, mut unjudged) = Default::default();
        match score {
            Some(_) => VecDeque::push_back(&mut pending, batch),
            None => Vec::push(&mut unjudged, batch),
        }
        let online = Some(OnlineState { pending, unjudged, replay: VecDeque::new() });
        Cursor { online, step: 9, ..cursor(9) }.beside_weights()
    };
    let earlier = state(8, 5, Some(0.5));
    assert_eq!(state(8, 5, None), earlier);
    assert_ne!(state(8, 6, Some(0.5)), earlier);
    let present = state(9, 5, None);
    assert_ne!(present, earlier);
    assert_eq!([state(9, 5, Some(0.5)), state(9, 6, None)], [present.clone(), present]);
}

#[test]
fn checkpoints_are_compared_bit_by_bit_whatever_their_parts() {
    let (_one, checkpoints) = setup(&[]);
    let (_three, others) = setup(&[]);
    let path = save_as(&checkpoints, 7, 1).expect("saved");
    let found = Checkpoint::open(&save_as(&others, 7, 3).expect("saved")).expect("complete");
    let same = compare(&Checkpoint::open(&path).expect("complete"), &found).expect("readable");
    assert!(same.is_same(), "{same:?}");
    assert_eq!((same.num_tensors, same.num_elements), (3, 20));
    change_last_element(&path);
    let other = compare(&Checkpoint::open_checked(&path).expect("readable"), &found).expect("readable");
    let element = other.element.clone().expect("a difference");
    assert_eq!((element.tensor.name.as_str(), element.element), ("adamw.exp_avg.scalar", 0));
    assert_ne!(element.recorded.to_bits(), element.found.to_bits());
    assert_eq!((other.num_different, other.is_same()), (1, false));
    let later = Checkpoint::open(&save_as(&checkpoints, 8, 1).expect("saved")).expect("complete");
    let other = compare(&later, &found).expect("readable");
    assert_eq!(other.cursor, Some(("step".to_owned(), "8".to_owned(), "7".to_owned())));
}

#[test]
fn hashes_of_states_are_read_around_damaged_and_torn_lines() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join(STATES);
    assert!(read_states(&path).expect("no file").is_empty());
    let [first, second] = [b"a", b"b"].map(|bytes| blake3::hash(bytes));
    for (step, hash) in [(2, first), (4, second), (4, first)] {
        state_hash::append(&path, step, hash).expect("written");
    }
    let text = fs::read_to_string(&path).expect("text");
    fs::write(&path, format!("what\n{text}{{\"step\": 6, \"bl")).expect("written");
    assert_eq!(read_states(&path).expect("text"), [(2, first), (4, first)].into());
}
