//! Groups of parameters that train apart from the rest: `[[train.groups]]`.

use regex::Regex;
use toml::Value;

use super::error::Result;
use super::form::{Form, custom, number};
use super::reader::Entry;

/// Parameters that train with a learning rate or a weight decay of their own, or not at all.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Regular expression, found anywhere in a tensor's name.
    pub parameters: String,
    /// Factor on the learning rate.
    pub learning_rate_factor: f64,
    /// Weight decay, also of biases and norms; `None` is that of the run.
    pub weight_decay: Option<f64>,
    /// Whether the parameters keep their first values.
    pub frozen: bool,
}

/// A list of tables, also written `[[train.groups]]`.
pub(super) fn groups<'a>() -> Form<'a, Vec<ParameterGroup>> {
    let read = |entry: Entry| {
        let wrong = entry.wrong("a list of tables, each with `parameters`");
        entry.items_of_list().ok_or(wrong)?.into_iter().map(read_group).collect()
    };
    custom("list of groups", read, |groups: &Vec<ParameterGroup>| {
        (!groups.is_empty()).then(|| Value::Array(groups.iter().map(written).collect()))
    })
}

fn read_group(entry: Entry) -> Result<ParameterGroup> {
    let mut section = entry.section()?;
    let pattern = section.take("parameters").ok_or_else(|| {
        section.missing("parameters", "a regular expression of tensor names, for example \"embed_tokens\"")
    })?;
    let parameters = pattern.string()?.to_owned();
    if let Err(error) = Regex::new(&parameters) {
        return Err(pattern.wrong(format!("a regular expression ({error})")));
    }
    let frozen = section.take("frozen").map(|entry| entry.boolean()).transpose()?.unwrap_or(false);
    let mut given = |key: &'static str| -> Result<Option<f64>> {
        let Some(entry) = section.take(key) else { return Ok(None) };
        if frozen {
            return Err(entry.conflict("the group is frozen, so it has no effect; remove one of the two"));
        }
        (number(0.0..).read)(entry).map(Some)
    };
    let (factor, weight_decay) = (given("learning_rate_factor")?, given("weight_decay")?);
    section.finish()?;
    Ok(ParameterGroup { parameters, learning_rate_factor: factor.unwrap_or(1.0), weight_decay, frozen })
}

fn written(group: &ParameterGroup) -> Value {
    let ParameterGroup { parameters, learning_rate_factor, weight_decay, frozen } = group;
    let mut table = toml::Table::new();
    table.insert("parameters".to_owned(), parameters.clone().into());
    if *frozen {
        table.insert("frozen".to_owned(), true.into());
    } else {
        table.insert("learning_rate_factor".to_owned(), (*learning_rate_factor).into());
        table.extend(weight_decay.map(|decay| ("weight_decay".to_owned(), decay.into())));
    }
    Value::Table(table)
}
