//! The examples that are plans: what is committed is what the command prints, and advice that was followed is followed right.
//! `TANDEM_BLESS=1` (or `examples/plans.sh`) writes what was found; look at it before it is committed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const EXAMPLES: [&str; 3] = ["phi2-two-a10", "llama31-8b", "llama-70b"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name).canonicalize().unwrap()
}

fn is_blessing() -> bool {
    std::env::var_os("TANDEM_BLESS").is_some()
}

/// A configuration of an example: its first two lines say what it is for, and the command that plans it.
struct Example {
    name: String,
    about: String,
    command: Vec<String>,
    folder: PathBuf,
}

impl Example {
    /// All of a folder.
    fn all(folder: &Path) -> Vec<Self> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            let Some(name) = file.strip_suffix(".toml") else { continue };
            let text = fs::read_to_string(folder.join(&file)).unwrap();
            let mut lines = text.lines().map(|line| line.strip_prefix("# "));
            let [about, command] = [(); 2].map(|()| lines.next().flatten());
            let (Some(about), Some(command)) = (about, command) else {
                panic!("{file} does not begin with what it is for, and the command")
            };
            let words: Vec<_> = command.split_whitespace().map(str::to_owned).collect();
            assert_eq!(words[..3], ["tandem", "plan", &file], "{file}");
            let (name, about) = (name.to_owned(), about.to_owned());
            found.push(Self { name, about, command: words[1..].to_vec(), folder: folder.to_owned() });
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    /// Output of the command, without the example's folder.
    fn plan(&self, more: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        let output = command.args(&self.command).args(more).current_dir(&self.folder).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let plan = String::from_utf8(output.stdout).unwrap();
        let expected = if plan.contains("\nit does not fit") { 2 } else { 0 };
        assert_eq!(output.status.code(), Some(expected), "{}: {stderr}", self.name);
        plan.replace(&format!("{}/", self.folder.display()), "")
    }

    fn devices(&self) -> &str {
        let at = self.command.iter().position(|word| word == "--devices").expect("the devices");
        &self.command[at + 1]
    }

    /// The row of the example's README.
    fn row(&self, plan: &str) -> String {
        let line = |start: &str| {
            let found = plan.lines().find(|line| line.starts_with(start));
            found.unwrap_or_else(|| panic!("{}: no line {start:?} in\n{plan}", self.name))
        };
        let step = line("about ")["about ".len()..].split(" a step").next().unwrap();
        let fit = line("it ")["it ".len()..].split(';').next().unwrap().replace(" a rank", "");
        let host = plan.lines().find_map(|line| line.strip_prefix("host memory "));
        let host = host.map_or(String::new(), |host| {
            let needed = host.split(": ").nth(1).unwrap().split(';').next().unwrap();
            format!("; {needed} of host memory")
        });
        let Self { name, about, .. } = self;
        let devices = self.devices();
        format!("{}{about} | {devices} | {fit}{host} | {step} | [plan]({name}.plan.txt) |", self.row_start())
    }

    fn row_start(&self) -> String {
        format!("| [`{0}.toml`]({0}.toml) | ", self.name)
    }
}

fn check(path: &Path, found: &str) {
    if is_blessing() {
        fs::write(path, found).unwrap();
    }
    let committed = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(found, committed, "{}: run examples/plans.sh", path.display());
}

#[test]
fn what_is_committed_is_what_the_plan_says() {
    for name in EXAMPLES {
        let folder = folder(name);
        let readme = fs::read_to_string(folder.join("README.md")).unwrap();
        let mut told = readme.clone();
        let examples = Example::all(&folder);
        assert!(examples.len() > 1, "{name}");
        for example in &examples {
            let plan = example.plan(&[]);
            check(&folder.join(format!("{}.plan.txt", example.name)), &plan);
            let start = example.row_start();
            let old = readme.lines().find(|line| line.starts_with(&start));
            let old = old.unwrap_or_else(|| panic!("{name}/README.md has no row {start:?}"));
            told = told.replace(old, &example.row(&plan));
        }
        check(&folder.join("README.md"), &told);
    }
}

/// `NAME-fits.toml` is `NAME.toml` with what the plan of that advises, and nothing else.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_config_that_follows_advice_has_the_plan_that_the_advice_promised() {
    let mut followed = 0;
    for name in EXAMPLES {
        let examples: BTreeMap<_, _> =
            Example::all(&folder(name)).into_iter().map(|example| (example.name.clone(), example)).collect();
        for (name, fits) in examples.iter().filter(|(name, _)| name.ends_with("-fits")) {
            let example = &examples[name.strip_suffix("-fits").unwrap()];
            let refused = example.plan(&[]);
            assert!(refused.contains("\nit does not fit"), "{}", example.name);
            let advice = refused.lines().find_map(|line| line.strip_prefix("or on the command line: "));
            let advice = advice.unwrap_or_else(|| panic!("{}: no advice in\n{refused}", example.name));
            let promised = example.plan(&advice.split_whitespace().collect::<Vec<_>>());
            assert!(promised.contains("\nit fits"), "{promised}");
            assert_eq!(fits.plan(&[]), promised, "{name}");
            followed += 1;
        }
    }
    assert!(followed > 0);
}

#[test]
fn every_example_is_in_the_list_of_them() {
    let list = fs::read_to_string(folder("README.md")).unwrap();
    for entry in fs::read_dir(folder("")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            assert!(list.contains(&format!("[{name}]({name}/README.md)")), "{name}");
            assert!(
                ["environment", "grpo", "launch", "online", "smollm2"].contains(&&*name)
                    || EXAMPLES.contains(&&*name),
                "{name} is not tested"
            );
        }
    }
}
