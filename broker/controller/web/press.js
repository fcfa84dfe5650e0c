// Whether the mouse, a pen or a finger is pressed on the page.
//
// A click is a press and a release at the same element. A list whose columns become wider in between takes the element
// away, and the browser reports no click. So answers wait until the release.

const PRESS_MS_MAX = 1_000; // longer presses, such as those that select text, do not hold answers back
const CLICK_MS = 50; // the click of a finger comes after its release

let released = Promise.resolve();
let release = () => {};

addEventListener("pointerdown", () => {
  release();
  released = new Promise((resolve) => (release = resolve));
  setTimeout(release, PRESS_MS_MAX);
}, { capture: true });

for (const end of ["pointerup", "pointercancel"]) {
  addEventListener(end, () => setTimeout(release, CLICK_MS), { capture: true });
}

/** Wait until nothing is pressed and the click has been handled, at most for PRESS_MS_MAX. */
export function whenReleased() {
  return released;
}
