"use strict";
// Show one turn at a time: buttons, and the arrow keys left and right.
const stepper = document.querySelector(".stepper");
if (stepper) {
  const total = Number(stepper.dataset.total);
  const answers = Number(stepper.dataset.answers);
  const status = stepper.querySelector("[role=status]");
  const buttons = Object.fromEntries(
    [...stepper.querySelectorAll("button")].map((button) => [button.dataset.move, button]),
  );
  const asked = /^#turn-(\d+)$/.exec(location.hash);
  let current = Math.min(Math.max(asked ? Number(asked[1]) : 1, 1), total);
  let all = false;
  const show = () => {
    for (const column of document.querySelectorAll(".episode")) {
      let found = false;
      for (const turn of column.querySelectorAll(".turn")) {
        turn.hidden = !all && Number(turn.dataset.turn) !== current;
        found ||= !turn.hidden;
      }
      column.querySelector(".ended").hidden = found;
    }
    const position = current > answers ? "End" : `Turn ${current} of ${answers}`;
    status.textContent = all ? `All ${answers} turns` : position;
    buttons.all.setAttribute("aria-pressed", String(all));
    for (const move of ["first", "previous"]) buttons[move].disabled = all || current === 1;
    for (const move of ["next", "last"]) buttons[move].disabled = all || current === total;
  };
  const go = (turn) => {
    if (all || turn < 1 || turn > total) return;
    current = turn;
    history.replaceState(null, "", `#turn-${current}`);
    show();
  };
  const moves = {
    first: () => go(1),
    previous: () => go(current - 1),
    next: () => go(current + 1),
    last: () => go(total),
    all: () => {
      all = !all;
      show();
    },
  };
  for (const [move, button] of Object.entries(buttons)) {
    button.addEventListener("click", moves[move]);
  }
  document.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: "previous", ArrowRight: "next" };
    const plain = !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey);
    if (!plain || !(event.key in keys) || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    moves[keys[event.key]]();
  });
  stepper.hidden = false;
  show();
}
