//! `docs/models.md`: its table is made from the registry and the goldens.

use std::fmt::Write;
use std::path::Path;

use tandem_model::families::FAMILIES;
use tandem_model::spec::{DecoderSpec, RotaryScaling};

use crate::support::{Golden, all};

/// Kinds of rotary embedding, named as in `rope_type`.
fn rotary(spec: &DecoderSpec) -> Vec<&'static str> {
    let name = |scaling: &RotaryScaling| match scaling {
        RotaryScaling::Default => "default",
        RotaryScaling::Linear { .. } => "linear",
        RotaryScaling::Dynamic { .. } => "dynamic",
        RotaryScaling::Llama3 { .. } => "llama3",
        RotaryScaling::Yarn { .. } => "yarn",
        RotaryScaling::Long { .. } => "longrope",
        RotaryScaling::Proportional { .. } => "proportional",
    };
    spec.rotary.iter().map(|r| r.as_ref().map_or("none", |r| name(&r.scaling))).collect()
}

/// The table: a row for each family, with what its goldens cover.
fn table() -> String {
    let mut table = String::from(
        "| `model_type` | class | goldens | rotary embedding in them | windows in them |\n\
         |---|---|---|---|---|\n",
    );
    let specs: Vec<_> = all().iter().map(|&name| (name, Golden::new(name).decoder.spec().clone())).collect();
    for family in &FAMILIES {
        let own: Vec<_> = specs.iter().filter(|(_, spec)| spec.family == family.model_type).collect();
        assert!(!own.is_empty(), "{} has no golden", family.model_type);
        let names: Vec<_> = own.iter().map(|(name, _)| format!("`{name}`")).collect();
        let mut kinds: Vec<_> = own.iter().flat_map(|(_, spec)| rotary(spec)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let windows = own.iter().any(|(_, spec)| spec.attention.windows.iter().any(Option::is_some));
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        writeln!(
            table,
            "| `{}` | {} | {} | {} | {} |",
            family.model_type,
            family.architecture,
            names.join(", "),
            kinds.join(", "),
            yes(windows)
        )
        .unwrap();
    }
    table
}

#[test]
fn the_page_of_models_has_the_table_of_the_registry() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- table -->\n", "<!-- end of table -->\n");
    let (before, rest) = page.split_once(begin).expect("the page marks its table");
    let (found, after) = rest.split_once(end).expect("the page marks the table's end");
    let expected = table();
    if std::env::var_os("TANDEM_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{begin}{expected}{end}{after}")).unwrap();
        return;
    }
    assert!(found == expected, "docs/models.md is old; TANDEM_WRITE_DOCS=1 writes it. Expected:\n{expected}");
}
