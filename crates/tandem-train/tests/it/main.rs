//! Runs of tiny models beside numbers of TRL, plans, and what must hold of every run.

#[path = "../../../../goldens/formula.rs"]
mod formula;
mod golden_distill;
mod golden_grpo;
mod golden_offline;
mod golden_online;
mod golden_train;
mod plan;
mod run;
mod small;
mod teacher;
