//! Trackers.

use super::{Given, Translator};
use crate::config::error::Result;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_texts, is_off};

impl Translator<'_> {
    pub(super) fn logging(&mut self) -> Result<()> {
        self.mlflow()?;
        let folder = self.part(Part::EventFolder);
        if let Some(given) = self.part(Part::UseTensorboard) {
            match given.flag()? {
                true => self.tensorboard(&given, folder.as_ref())?,
                false => self.not_needed(&given, "it is off here too"),
            }
        }
        for (part, script) in
            [(Part::UseWandb, "wandb"), (Part::UseTrackio, "trackio"), (Part::UseComet, "comet")]
        {
            if let Some(given) = self.part(part) {
                match given.flag()? {
                    true => self.script(&given, script),
                    false => {
                        self.not_needed(&given, "it is off here too");
                        let is_project = |part: &Part| script == "wandb" && *part == Part::WandbProject;
                        self.parts.retain(|part, _| !is_project(part));
                    }
                }
            }
        }
        if let Some(given) = self.part(Part::ReportTo) {
            for name in as_texts(&given.value).unwrap_or_default() {
                self.report_to(&given, &name, folder.as_ref())?;
            }
        }
        // A project alone turns the service on.
        if let Some(given) = self.part(Part::WandbProject).filter(|given| !is_off(&given.value)) {
            self.parts.insert(Part::WandbProject, given.clone());
            self.script(&given, "wandb");
        }
        if self.draft.get("logging.tensorboard").is_none()
            && let Some(given) = folder
        {
            self.not_needed(&given, "`logging.tensorboard` turns event files on, and may be their folder");
        }
        Ok(())
    }

    fn mlflow(&mut self) -> Result<()> {
        let (uri, experiment) = (self.part(Part::MlflowUri), self.part(Part::MlflowExperiment));
        let uses = self.part(Part::UseMlflow).filter(|given| !is_off(&given.value));
        if let Some(given) = uri.filter(|given| !is_off(&given.value)) {
            self.draft.set("logging.mlflow.uri", given.text()?, given.shown());
            if let Some(given) = experiment.filter(|given| !is_off(&given.value)) {
                self.draft.set("logging.mlflow.experiment", given.text()?, given.shown());
            }
        } else if let Some(given) = uses.or(experiment) {
            self.missing(&given, "give `logging.mlflow.uri`, the server's address");
        }
        Ok(())
    }

    fn report_to(&mut self, given: &Given, name: &str, folder: Option<&Given>) -> Result<()> {
        match name {
            "tensorboard" => self.tensorboard(given, folder)?,
            "wandb" | "trackio" | "aim" => self.script(given, name),
            "comet_ml" => self.script(given, "comet"),
            "mlflow" if self.draft.get("logging.mlflow.uri").is_some() => {}
            "mlflow" => self.missing(given, "give `logging.mlflow.uri`, the server's address"),
            "none" => self.not_needed(given, "a run has no trackers unless `[logging]` names them"),
            "all" => self.not_needed(given, "`[logging]` names each tracker"),
            _ => self.missing(given, "`logging.command` sends the records to a program of yours"),
        }
        Ok(())
    }

    fn tensorboard(&mut self, given: &Given, folder: Option<&Given>) -> Result<()> {
        match folder.filter(|folder| !is_off(&folder.value)) {
            Some(folder) => {
                let path = self.facts.local(folder.text()?);
                self.draft.set("logging.tensorboard", path, folder.shown());
            }
            None => self.draft.set("logging.tensorboard", true, given.shown()),
        }
        Ok(())
    }

    /// Runs a script of the repository; a run has one program.
    fn script(&mut self, given: &Given, script: &str) {
        let path = format!("tools/trackers/{script}.py");
        let mut command = vec!["python3".to_owned(), path.clone()];
        if script == "wandb" {
            let settings = [(Part::WandbProject, "WANDB_PROJECT"), (Part::WandbEntity, "WANDB_ENTITY")];
            let variables: Vec<String> = settings
                .into_iter()
                .filter_map(|(part, variable)| {
                    let given = self.part(part)?;
                    (!is_off(&given.value)).then_some(format!("{variable}={}", given.value.as_str()?))
                })
                .collect();
            if !variables.is_empty() {
                command.splice(0..0, std::iter::once("env".to_owned()).chain(variables));
            }
        }
        let known = self.draft.get("logging.command").map(ToString::to_string);
        match known {
            None => {
                let comment = format!("{}: a script of Tandem's repository", given.shown());
                self.draft.set("logging.command", command, comment);
            }
            Some(known) if known.contains(&path) => {}
            Some(_) => self.missing(given, "`logging.command` is one program, and another setting names it"),
        }
    }
}
