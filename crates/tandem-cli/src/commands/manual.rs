//! `tandem completions` and `tandem man`: what a package installs beside the binary, from the command line's
//! own definition.

use std::fs;

use anyhow::Context;
use clap::CommandFactory;

use crate::args::{Arguments, CompletionsArguments, ManArguments};
use crate::exit::Exit;
use crate::output::print_lines;

pub(crate) fn completions(arguments: &CompletionsArguments) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "tandem", &mut script);
    let script = String::from_utf8(script).context("a completion script is text")?;
    print_lines(&[script.trim_end().to_owned()])?;
    Ok(Exit::Done)
}

pub(crate) fn pages(arguments: &ManArguments) -> anyhow::Result<Exit> {
    let folder = &arguments.folder;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    clap_mangen::generate_to(Arguments::command(), folder)
        .with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
    Ok(Exit::Done)
}
