//! The page of all commands, `docs/commands.md`, from the command line's own definition; and a check that every
//! command of the documentation is one.

use std::fmt::Write;

use clap::{Arg, ArgAction, Command, CommandFactory, Parser};

use crate::args::{self, Arguments};

#[path = "../../tests/it/book/blocks.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests that run commands use the rest")]
mod blocks;

const INTRODUCTION: &str = "\
# Commands

<!-- Generated from crates/tandem-cli/src/args.rs: do not edit.
     TANDEM_BLESS=1 cargo test -p tandem-cli commands_page writes this file. -->

`tandem COMMAND --help` prints the same. `tandem man FOLDER` writes it as manual pages, and
`tandem completions SHELL` completes it. Results go to standard output, everything else to standard
error. [Exit codes](exit-codes.md) are those of all commands.

";

/// Returns the page.
fn commands_page() -> String {
    let mut command = Arguments::command();
    command.build();
    let mut page = INTRODUCTION.to_owned();
    page.push_str("| command | purpose |\n|---|---|\n");
    let shown = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    for sub in command.get_subcommands().filter(shown) {
        let name = sub.get_name();
        writeln!(page, "| [`tandem {name}`](#tandem-{name}) | {} |", about(sub)).expect("a string");
    }
    for sub in command.get_subcommands().filter(shown) {
        section(&mut page, sub, "##");
        for inner in sub.get_subcommands().filter(shown) {
            section(&mut page, inner, "###");
        }
    }
    page
}

fn section(page: &mut String, command: &Command, level: &str) {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let usage = command.clone().render_usage().to_string();
    let usage: Vec<&str> = usage.trim_start_matches("Usage:").lines().map(str::trim).collect();
    let (about, usage) = (sentence(&about(command)), usage.join("\n"));
    write!(page, "\n{level} `{name}`\n\n{about}\n\n```text\n{usage}\n```\n").expect("a string");
    let mut heading = None;
    for (number, argument) in command.get_arguments().filter(|argument| is_shown(argument)).enumerate() {
        if number == 0 || argument.get_help_heading() != heading {
            heading = argument.get_help_heading();
            let heading = heading.map(|heading| format!("{heading}:\n\n")).unwrap_or_default();
            write!(page, "\n{heading}| argument | default | meaning |\n|---|---|---|\n").expect("a string");
        }
        row(page, argument);
    }
}

fn is_shown(argument: &Arg) -> bool {
    let own = matches!(argument.get_action(), ArgAction::Help | ArgAction::Version);
    !argument.is_hide_set() && !own
}

fn row(page: &mut String, argument: &Arg) {
    let values: Vec<String> = match argument.get_action().takes_values() {
        true => argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect(),
        false => Vec::new(),
    };
    let values = values.join(" ");
    let name = match (argument.get_long(), argument.get_short()) {
        (Some(long), Some(short)) => format!("-{short}, --{long} {values}"),
        (Some(long), None) => format!("--{long} {values}"),
        (None, Some(short)) => format!("-{short} {values}"),
        (None, None) => values,
    };
    let default: Vec<String> = argument
        .get_default_values()
        .iter()
        .filter(|_| argument.get_action().takes_values())
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    let mut meaning = sentence(&argument.get_help().map(ToString::to_string).unwrap_or_default());
    let possible: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set() && argument.get_action().takes_values())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !possible.is_empty() {
        write!(meaning, " One of {}.", possible.join(", ")).expect("a string");
    }
    writeln!(page, "| `{}` | {} | {} |", name.trim_end(), default.join(" "), cell(&meaning))
        .expect("a string");
}

fn about(command: &Command) -> String {
    cell(&command.get_about().map(ToString::to_string).unwrap_or_default())
}

/// Text with its last full stop, which clap takes away.
fn sentence(text: &str) -> String {
    if text.is_empty() || text.ends_with(['.', '`', '?']) { text.to_owned() } else { format!("{text}.") }
}

/// Text of a table's cell.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "&lt;")
}

/// `docs/commands.md` is what [`commands_page`] writes; `TANDEM_BLESS=1` writes it.
#[test]
fn commands_page_is_committed() {
    let page = commands_page();
    if std::env::var_os("TANDEM_BLESS").is_some() {
        std::fs::write(blocks::root().join("docs/commands.md"), &page).expect("written");
    }
    let committed = blocks::read("docs/commands.md");
    assert!(
        page == committed,
        "TANDEM_BLESS=1 cargo test -p tandem-cli commands_page writes docs/commands.md"
    );
}

/// Parses a command as the program does, and the command that `tandem launch` gives to its ranks.
fn parse(words: &[String]) -> Result<(), clap::Error> {
    let parsed = Arguments::try_parse_from(words)?;
    if let args::Command::Launch(launch) = parsed.command {
        let mut inner = vec!["tandem".to_owned()];
        inner.extend(launch.command);
        parse(&inner)?;
    }
    Ok(())
}

#[test]
fn every_command_of_the_pages_is_one_that_the_program_takes() {
    let mut wrong = Vec::new();
    let mut parsed = 0;
    for page in blocks::pages() {
        for block in blocks::blocks(&page).iter().filter(|block| block.has_commands()) {
            for line in block.lines() {
                let calls = blocks::commands(&line);
                let calls =
                    calls.unwrap_or_else(|| panic!("{}: a quotation mark is open in {line}", block.place));
                for call in calls {
                    parsed += 1;
                    match parse(&call) {
                        Ok(()) => {}
                        Err(error) if !error.use_stderr() => {}
                        Err(error) => wrong.push(format!("{}: {}\n{error}", block.place, call.join(" "))),
                    }
                }
            }
        }
    }
    assert!(parsed > 40, "{parsed} commands only");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Commands within sentences leave out what does not matter there; subcommands and flags must exist.
#[test]
fn every_command_within_a_sentence_has_flags_of_the_program() {
    let mut command = Arguments::command();
    command.build();
    let mut wrong = Vec::new();
    for page in blocks::pages() {
        for (index, line) in blocks::read(&page).lines().enumerate() {
            for code in line.split('`').skip(1).step_by(2).filter(|code| code.starts_with("tandem ")) {
                let words = shlex::split(code).unwrap_or_default();
                if let Err(word) = check_flags(&command, &words[1..]) {
                    wrong.push(format!("{page}:{}: `{code}` has {word}", index + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the first word that `command` does not know.
fn check_flags(command: &Command, words: &[String]) -> Result<(), String> {
    let mut at = command;
    for word in words {
        if let Some(flag) = word.strip_prefix("--").filter(|flag| !flag.is_empty()) {
            let flag = flag.split('=').next().unwrap_or_default();
            let known = at.get_arguments().any(|argument| argument.get_long() == Some(flag));
            // A rank's command follows the launcher's own arguments.
            let of_rank = || {
                let mut commands = command.get_subcommands();
                at.get_name() == "launch"
                    && commands
                        .any(|sub| sub.get_arguments().any(|argument| argument.get_long() == Some(flag)))
            };
            if !known && !of_rank() {
                return Err(word.clone());
            }
        } else if let Some(sub) = at.find_subcommand(word) {
            at = sub;
        } else if at.get_name() == command.get_name() {
            // `COMMAND`, or a list of commands.
            let is_placeholder = word.chars().all(|c| !c.is_ascii_lowercase());
            return if is_placeholder { Ok(()) } else { Err(word.clone()) };
        }
    }
    Ok(())
}
