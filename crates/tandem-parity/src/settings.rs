//! TRL's arguments as a `run.toml`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The policy's folder.
    pub model: PathBuf,
    /// The `[adapter]` table's lines, if an adapter trains.
    pub adapter: Option<String>,
    /// The `[reference]` table's lines.
    pub reference: String,
    /// A JSONL file.
    pub data: PathBuf,
    /// A JSONL file to evaluate on.
    pub eval: Option<PathBuf>,
    /// The `[objective]` table's lines.
    pub objective: String,
    /// Pairs per step.
    pub batch_size: u64,
    /// Pairs per micro-batch.
    pub micro_batch_size: u64,
    /// Steps.
    pub steps: u64,
    /// `adamw` or `rmsprop`.
    pub optimizer: &'static str,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Largest gradient norm.
    pub max_grad_norm: f64,
    /// `f32` or `bf16`.
    pub dtype: &'static str,
}

impl Settings {
    /// Formats the file of a run that writes to `output` and caches in `cache`.
    pub(crate) fn toml(&self, output: &Path, cache: &Path) -> String {
        let eval = self.eval.as_ref().map_or(String::new(), |path| format!("eval = {path:?}\n"));
        let adapter = self.adapter.as_ref().map_or(String::new(), |lines| format!("[adapter]\n{lines}\n"));
        format!(
            "method = \"dpo\"\nmodel = {:?}\noutput = {:?}\nseed = 42\n\
             {adapter}[reference]\n{}\n\
             [data]\ntrain = {:?}\n{eval}cache = {cache:?}\nmax_length = 1024\norder = \"sequential\"\n\
             [objective]\n{}\n\
             [train]\nbatch_size = {}\nmicro_batch_size = {}\nsteps = {}\noptimizer = {:?}\nlearning_rate = {:e}\n\
             schedule = \"linear\"\nwarmup_steps = {}\nmax_grad_norm = {:?}\nweight_decay = 0.0\n\
             [compute]\ndtype = {:?}\n",
            self.model,
            output,
            self.reference,
            self.data,
            self.objective,
            self.batch_size,
            self.micro_batch_size,
            self.steps,
            self.optimizer,
            self.learning_rate,
            self.warmup_steps,
            self.max_grad_norm,
            self.dtype,
        )
    }

    /// Applies the arguments of a TRL run.
    ///
    /// # Errors
    /// Names an argument that Tandem lacks.
    pub(crate) fn apply(&mut self, args: &Value) -> Result<(), String> {
        self.objective = objective(args)?;
        let number = |key: &str| args[key].as_f64().ok_or_else(|| format!("{key} is {}", args[key]));
        self.micro_batch_size = number("per_device_train_batch_size")? as u64;
        self.batch_size = self.micro_batch_size * number("gradient_accumulation_steps")? as u64;
        self.steps = number("max_steps")? as u64;
        self.learning_rate = number("learning_rate")?;
        self.warmup_steps = number("warmup_steps")? as u64;
        self.max_grad_norm = number("max_grad_norm")?;
        self.optimizer = match args["optim"].as_str() {
            Some("adamw_torch") => "adamw",
            Some("rmsprop") => "rmsprop",
            other => return Err(format!("optimizer {other:?}")),
        };
        self.dtype = if args["bf16"] == true { "bf16" } else { "f32" };
        if args["precompute_ref_log_probs"] == true {
            self.reference = self.reference.replace("\"model\"", "\"precompute\"");
        }
        Ok(())
    }
}

/// Formats the `[objective]` table of TRL's arguments; absent keys have TRL's defaults.
///
/// # Errors
/// Names an argument that Tandem lacks.
pub(crate) fn objective(args: &Value) -> Result<String, String> {
    let losses: Vec<&str> = match args.get("loss_type").and_then(Value::as_array) {
        Some(list) => list.iter().filter_map(Value::as_str).collect(),
        None => vec!["sigmoid"],
    };
    let mut lines = String::new();
    if let [only] = losses[..] {
        let _ = writeln!(lines, "loss = {only:?}");
    } else {
        let weight = |i: usize| args["loss_weights"][i].as_f64().unwrap_or(1.0);
        let terms: Vec<String> =
            losses.iter().enumerate().map(|(i, l)| format!("{l} = {:?}", weight(i))).collect();
        let _ = writeln!(lines, "loss = {{ {} }}", terms.join(", "));
    }
    let _ = writeln!(lines, "beta = {:?}", args.get("beta").and_then(Value::as_f64).unwrap_or(0.1));
    if let Some(smoothing) = args.get("label_smoothing").and_then(Value::as_f64).filter(|&s| s != 0.0) {
        let _ = writeln!(lines, "label_smoothing = {smoothing:?}");
    }
    if let Some(divergence) = args.get("f_divergence_type").and_then(Value::as_str) {
        let _ = writeln!(lines, "f_divergence_type = {divergence:?}");
        if let Some(alpha) = args.get("f_alpha_divergence_coef").and_then(Value::as_f64)
            && divergence == "alpha_divergence"
        {
            let _ = writeln!(lines, "f_alpha_divergence_coef = {alpha:?}");
        }
    }
    if let Some(alpha) = args.get("ld_alpha").and_then(Value::as_f64) {
        let _ = writeln!(lines, "ld_alpha = {alpha:?}");
    }
    if args.get("use_weighting") == Some(&Value::Bool(true)) {
        let _ = writeln!(lines, "use_weighting = true");
    }
    if let Some(tau) =
        args.get("discopop_tau").and_then(Value::as_f64).filter(|_| losses.contains(&"discopop"))
    {
        let _ = writeln!(lines, "discopop_tau = {tau:?}");
    }
    Ok(lines)
}
