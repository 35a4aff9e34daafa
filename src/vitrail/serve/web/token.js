// The dialog that prompts for the server's token, on both pages.

const $ = (id) => document.getElementById(id);

export function requestToken(rejected) {
  return new Promise((resolve) => {
    $("token-note").textContent = rejected ? "The token was rejected; try another." : "It is stored until this tab is closed.";
    $("token-dialog").oncancel = (event) => event.preventDefault();
    $("token-form").onsubmit = (event) => { event.preventDefault(); $("token-dialog").close(); resolve($("token").value); };
    $("token-dialog").showModal();
  });
}
