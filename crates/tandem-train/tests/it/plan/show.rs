//! The look of a plan: in a terminal, in a browser, to a program.

use std::fs;
use std::path::Path;

use tandem_kernels::MemoryKind;
use tandem_train::plan::show::text::grouped;

use super::sketch::{Sketch, device};

/// `TANDEM_BLESS=1` writes what was found; look at it before it is committed.
#[test]
fn the_picture_of_a_small_plan_is_the_golden_one() {
    let sketch = Sketch::small();
    let settings = ["compute.pipeline=2", "compute.memory=12MiB", "train.save_every=0"];
    let plan = sketch.plan(&settings, 4, &device("A10"));
    let mut found = String::new();
    for (_, of_ranks) in &plan.ranks {
        // The model's name is a temporary folder.
        found += &of_ranks.to_string().replace(&sketch.path().display().to_string(), "model");
        found += "\n\n";
    }
    found += &plan.picture(false);
    found += &format!("\n\n{}\n", plan.verdict());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/plan/golden.txt");
    if std::env::var_os("TANDEM_BLESS").is_some() {
        fs::write(&path, &found).unwrap();
    }
    assert_eq!(found, fs::read_to_string(&path).unwrap());
}

#[test]
fn colours_are_the_only_difference_of_a_coloured_picture() {
    let plan = Sketch::small().plan(&[], 1, &device("A10"));
    let coloured = plan.picture(true);
    assert!(coloured.contains("\x1b[38;5;25m█"), "{coloured}");
    let mut plain = String::new();
    for piece in coloured.split("\x1b[") {
        plain += piece
            .split_once('m')
            .filter(|(code, _)| code.bytes().all(|b| b.is_ascii_digit() || b == b';'))
            .map_or(piece, |(_, rest)| rest);
    }
    let blocks =
        |text: &str| text.chars().map(|c| if c.is_ascii() || c == '│' { c } else { '#' }).collect::<String>();
    assert_eq!(blocks(&plain), blocks(&plan.picture(false)));
}

/// Every tag that is opened is closed, in order; attributes are quoted; nothing is fetched and no script runs.
#[test]
fn the_page_is_well_formed_stands_alone_and_has_the_numbers_of_the_plan() {
    let sketch = Sketch::small();
    let plan = sketch.plan(&["compute.sharding=zero1"], 2, &device("A10"));
    let page = plan.page(Some("set <this> & \"that\""));
    let body = page.strip_prefix("<!DOCTYPE html>\n").expect("a doctype");
    let mut open: Vec<&str> = Vec::new();
    for piece in body.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("no end of <{piece}"));
        assert!(!text.contains('>'), "{text}");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        match tag.strip_prefix('/') {
            Some(closed) => assert_eq!(open.pop(), Some(closed), "</{closed}>"),
            None if tag.ends_with('/') => {}
            None => open.push(tag.split(' ').next().unwrap()),
        }
    }
    assert_eq!(open, [""; 0]);
    for outside in ["<script", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("set &lt;this&gt; &amp; &quot;that&quot;"));
    let rank = plan.fullest();
    assert!(page.contains(&grouped(rank.num_parameters)));
    for phase in &rank.phases {
        let bytes = phase.memory.at_peak[MemoryKind::Gradients as usize];
        assert!(
            page.contains(&format!("<td>{} KiB</td>", (bytes as f64 / 1024.0).round())),
            "{}",
            phase.name
        );
        assert!(page.contains(&phase.in_words()), "{}", phase.name);
    }
}

#[test]
fn the_json_has_every_rank_and_adds_up() {
    let plan = Sketch::small().plan(&["compute.sharding=zero3", "compute.pipeline=2"], 4, &device("A10"));
    let json = plan.to_json();
    assert_eq!((json["fits"].as_bool(), json["device"].as_str()), (Some(true), Some("A10")));
    let mut ranks = Vec::new();
    for group in json["ranks"].as_array().unwrap() {
        ranks.extend(group["ranks"].as_array().unwrap().iter().map(|rank| rank.as_u64().unwrap()));
        for phase in group["plan"]["phases"].as_array().unwrap() {
            let kinds = phase["bytes_at_peak"].as_object().unwrap().values();
            let sum: u64 = kinds.map(|bytes| bytes.as_u64().unwrap()).sum();
            assert_eq!(Some(sum), phase["peak_bytes"].as_u64(), "{phase}");
            assert!(phase["high_water_bytes"].as_u64() >= Some(sum), "{phase}");
            assert_ne!(phase["moment"]["place"], "", "{phase}");
        }
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2, 3]);
    let estimate = &json["estimate"];
    let number = |name: &str| estimate[name].as_f64().unwrap();
    let parts = number("compute_seconds") + number("exchange_seconds") + number("bubble_seconds");
    assert!((parts / number("step_seconds") - 1.0).abs() < 1e-12, "{estimate}");
    assert!(number("bubble_seconds") > 0.0 && number("bytes_sent_in_a_step") > 0.0, "{estimate}");
}

#[test]
fn what_trains_and_what_is_frozen_is_counted() {
    let sketch = Sketch::small();
    // Tables and head of 1000 x 64, and of each block: q, k, v, o, gate, up, down, and two norms; the last norm.
    let matrices = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)];
    let block: usize = matrices.iter().map(|(from, to)| from * to).sum::<usize>() + 2 * 64;
    let model = 2 * 1000 * 64 + 4 * block + 64;
    // LoRA of rank 4: two factors beside each.
    let adapter = 4 * matrices.iter().map(|(from, to)| 4 * (from + to)).sum::<usize>();
    let saved = ["adapter.rank=4", "adapter.modules_to_save=[\"lm_head\"]", "reference.kind=base"];
    let stages = ["adapter.rank=4", "reference.kind=base", "compute.pipeline=2"];
    for (settings, ranks, trained, frozen, text) in [
        (&[][..], 1, model, 0, format!("{} parameters train, none are frozen; ", grouped(model))),
        (
            &saved[..],
            1,
            adapter + 64_000,
            model,
            format!("{} parameters train, {} are frozen; ", grouped(adapter + 64_000), grouped(model)),
        ),
        (
            &stages[..],
            2,
            adapter,
            model,
            format!("{} parameters train, {} are frozen; ", grouped(adapter), grouped(model)),
        ),
    ] {
        let plan = sketch.plan(settings, ranks, &device("A10"));
        for (_, plan) in &plan.ranks {
            assert_eq!((plan.num_trained, plan.num_frozen), (trained, frozen), "{settings:?}");
            assert!(plan.headline().contains(&text), "{}", plan.headline());
            let json = plan.to_json();
            assert_eq!(json["num_trained_parameters"], trained, "{settings:?}");
            assert_eq!(json["num_frozen_parameters"], frozen, "{settings:?}");
        }
        assert!(plan.page(None).contains(&text));
    }
}
