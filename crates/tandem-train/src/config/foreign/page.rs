//! The page of other programs' settings, `docs/coming-from.md`, from the tables that translate them.

use std::fmt::Write;

use super::Program;
use super::name::Meaning;

const INTRODUCTION: &str = "# Coming from TRL, Axolotl, LLaMA-Factory, Accelerate, DeepSpeed or Mitchell's code

<!-- Generated from crates/tandem-train/src/config/foreign: do not edit.
     TANDEM_BLESS=1 cargo test -p tandem-train coming_from_page writes this file. -->

<!-- not run: the files are yours; a test of tandem-cli translates a file of each kind -->
```sh
tandem init --from dpo.yaml                               # a YAML file of TRL, Axolotl or LLaMA-Factory
tandem init --from train.sh                               # the command line of a training script
tandem init --from accelerate.yaml --from dpo.yaml        # the files of one run; also a DeepSpeed JSON
tandem init --from train.sh --data pairs.jsonl --ranks 4  # what no file says
```

Each writes `run.toml` with the run that the other program would have made. A comment behind a key is
its origin. Settings that are not needed, not known or cannot be had are listed at the end, with the
reason. The model and the rows are then opened and the run is planned; changes that make it fit are
marked. `--no-plan` leaves that out. A method, a loss or a value that cannot be had is an error.

A command may stand behind others (`cd x &&`, `nohup`, `srun`, `docker run`); it ends at the shell's `|`, `&`
or `;`, and redirections are left out. A variable has the text that a line above assigns to it
(`MODEL=m`); any other one is an error, also one that a branch or a loop assigns. `\"$@\"`, or `$EXTRA`
where no value is due, stands for further arguments and is listed at the end.

`trl orpo` and `trl cpo` are `method = \"dpo\"` with their losses (a file with `cpo_alpha` or `loss_type: simpo` is CPO's,
too), `trl bco` is `\"kto\"` with its loss, `trl xpo` and
`trl nash_md` are `\"online\"` with that algorithm. `ppo`, `rloo` and `prm` cannot be had.

Where no command names the method, the file's or the folder's name does, then settings that only one method has. `beta`
alone is taken for DPO, which the file says.

The program is recognised from the content; `--kind` names it. Files that a file names are read too:
`--config`, `--config_file`, `deepspeed`, `dataset_info.json`. A setting of the command line wins over the
file's, and the trainer's wins over the launcher's; schedule and optimiser of a DeepSpeed file win, as in
transformers. `--set` and `run.toml` themselves take no other program's names, but the error has the
translation.

## Numbers

| there | here |
|---|---|
| rows of a device × accumulation × devices | `train.batch_size`, over all ranks. The number of ranks is that of Accelerate, torchrun, DeepSpeed's launcher, `trl --num_processes`, `NPROC_PER_NODE` of LLaMA-Factory or `--ranks`, else 1; ranks that share a batch (tensor, context, sequence) count once |
| `packing`: a batch counts packed sequences | `train.batch_size` counts rows: the batch is multiplied by the rows that fit into a sequence, measured on yours |
| rows of a device, where one rank accumulates | `train.micro_batch_tokens`: those of so many rows of whole length, so that short rows share a micro-batch. It changes nothing but the rounding of sums |
| steps of an epoch: rounded up | the same |
| schedules and warm-up of transformers | the same rate at every step; a share of steps is rounded up. `constant` has no warm-up there, `constant_with_warmup` has |
| mean over tokens (SFT) or pairs (DPO) of a whole batch | the same on any number of ranks and micro-batches |
| the last batch of an epoch, if it is incomplete | a mean over its pairs, too; TRL's DPO gives each micro-batch the same weight, so the pairs of one that is not full count more |
| `lora_alpha` / `r`, or / √`r` with rsLoRA | the same |
| `lora_dropout` of TRL | 0, but for SFT, GRPO and `DistillationTrainer`: the others have `disable_dropout`, on by default, which sets it to 0 there too |
| `label_smoothing` of TRL's `DPOTrainer` | left out where the loss ignores it there, as `sigmoid` does |
| `trl orpo` | `data.loss_on = \"all\"`: its likelihood has the prompt's tokens, too |
| checkpoints that are kept | all (`train.keep = 0`), 4 with Axolotl, where the file saves and gives no limit |
| `eval_strategy: steps` without `eval_steps` | every `logging_steps`, as in transformers |
| rows longer than the limit | cut; Axolotl leaves them out and LLaMA-Factory cuts the prompt too, which the file says |
| `steps_per_generation` of TRL's GRPO, in micro-batches | `online.steps_per_round`, in steps |
| `modules_to_save` with a token table that is the head, too | the head trains with it; PEFT trains a copy of the table alone |
| GPT-2 in SFT, first tokens trained on | transformers divides by those, too, which have no prediction: its loss and gradient are smaller |
| no target modules given | PEFT's default for the model's type, written out |
| SFT on `messages` in TRL | every token is trained on unless `assistant_only_loss`: `data.loss_on = \"all\"` |
| pairs for TRL's `KTOTrainer`, which unpairs them | the same completions in the same order; a batch and an epoch count completions |
| gradients clipped at 1, AdamW's constants, no weight decay on biases and norms | the same defaults |

Defaults that are written out where a file is silent:

| | learning rate | schedule | batch of a device | epochs | `max_length` | LoRA |
|---|---|---|---|---|---|---|
| TRL | SFT and GKD 2e-5, reward 1e-4, online DPO 5e-7, others 1e-6 | linear | 8 | 3 | 1024 | rank 16, alpha 32, dropout 0.05 (SFT, GRPO, `DistillationTrainer`) |
| Axolotl | must be given | cosine, warm-up 3 % | 1 | 1 | 512 | alpha of PEFT |
| LLaMA-Factory | 5e-5 | linear | 8 | 3 | 2048 | rank 8, alpha twice the rank, all linear layers |
| Mitchell's code | 5e-7 | constant, 150 steps of warm-up | 4 in all | 1 | 512, prompts 256 | none |

Differences that remain: the order of rows within an epoch, the draws of dropout, and the last bits of
sums. Mitchell's warm-up gives step i of w the share (i + 1) / (w + 1), here it is i / w.
";

/// Returns the page.
pub fn coming_from_page() -> String {
    let mut page = INTRODUCTION.to_owned();
    for (_, program) in Program::NAMES {
        let _ = write!(page, "\n## {}\n\n{}| there | here |\n|---|---|\n", program.title(), about(program));
        for name in program.own() {
            let names: Vec<_> = name.names.iter().map(|name| format!("`{name}`")).collect();
            let _ = writeln!(page, "| {} | {} |", names.join(", "), cell(name.meaning));
        }
    }
    page
}

fn about(program: Program) -> &'static str {
    match program {
        Program::Trl => {
            "With `TrainingArguments` of transformers, `ModelConfig`, PEFT's `LoraConfig` and bitsandbytes' settings.\n\n"
        }
        Program::Axolotl => "Settings of TRL's names are in its table.\n\n",
        Program::LlamaFactory => "Settings of transformers' names are in TRL's table.\n\n",
        Program::DeepSpeed => "`\"auto\"` leaves a value to the trainer's own setting.\n\n",
        Program::Accelerate | Program::Mitchell => "",
    }
}

fn cell(meaning: Meaning) -> String {
    match meaning {
        Meaning::Key { key, remark: "", .. } => format!("`{key}`"),
        Meaning::Key { key, remark, .. } => format!("`{key}`: {remark}"),
        Meaning::Part { advice, .. } => {
            let advice = advice.strip_prefix("it ").unwrap_or(advice);
            advice.strip_prefix("is ").unwrap_or(advice).replacen(" here", "", 1)
        }
        Meaning::NotNeeded(reason) => format!("not needed: {reason}"),
        Meaning::Missing(reason) => format!("cannot be had: {reason}"),
    }
}
